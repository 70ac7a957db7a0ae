"""Run as one rank on a netlab host: do each operation, or a step of each reducer given, tell what was booked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

import torch

import thinwire as tw
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.netlab import sent_bytes

SIZE = 2_000_000
ATTEMPTS = 3  # a busy Linux kernel sends, and counts, again what it takes for lost


def operations(comm: Comm) -> dict[str, Callable[[], object]]:
    data = torch.zeros(SIZE, dtype=torch.uint8)
    last = comm.size - 1
    parts = [data[: SIZE // (1 + to)] for to in range(comm.size)]
    like = [data[: SIZE // (1 + comm.rank)]] * comm.size
    return {
        "all_reduce": lambda: comm.sum(data),
        "all_gather": lambda: comm.all_gather(data),
        "all_to_all": lambda: comm.all_to_all(parts, like),
        "broadcast from 0": lambda: comm.broadcast(data),
        "broadcast from the last": lambda: comm.broadcast(data, root=last),
        "send": lambda: comm.send(data, last) if comm.rank == 0 else comm.rank == last and comm.recv(data, 0),
    }


def reducers(specs: list[str], comm: Comm) -> dict[str, Callable[[], object]]:
    """With gradients of the size of VGG16's."""
    net = registry.build("models", "vgg16", (3, 32, 32), 10)
    gradients = {name: torch.ones(p.shape) for name, p in net.named_parameters()}

    def run(spec: str) -> None:
        reducer = registry.build("reducers", spec)
        reducer.reduce(gradients, reducer.init(gradients), comm)

    return {spec: partial(run, spec) for spec in specs}


def main() -> None:
    with tw.join() as comm:
        specs = sys.argv[1:]
        for name, run in (reducers(specs, comm) if specs else operations(comm)).items():
            for attempt in range(ATTEMPTS):
                comm.barrier()
                booked, kernel = comm.ledger.rows(), sent_bytes()
                comm.barrier()  # nobody begins before all have read their counters
                run()
                comm.barrier()
                comm.barrier()
                row = {"op": name, "rank": comm.rank, "nodes": comm.nodes, "attempt": attempt}
                for key in ("wire_bytes", "between_bytes"):
                    row[key] = sum(r[key] for r in comm.ledger.rows()) - sum(r[key] for r in booked)
                row |= {link: count - kernel[link] for link, count in sent_bytes().items()}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
