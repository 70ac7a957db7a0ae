"""Run as one rank on a netlab host: do each operation, tell what the ledger booked for it."""

from __future__ import annotations

import json
import sys

import torch

import thinwire as tw
from thinwire.comm.base import Comm
from thinwire.netlab import sent_bytes

SIZE = 2_000_000


def operations(comm: Comm) -> dict[str, object]:
    data = torch.zeros(SIZE, dtype=torch.uint8)
    last = comm.size - 1
    parts = [data[: SIZE // (1 + to)] for to in range(comm.size)]
    like = [data[: SIZE // (1 + comm.rank)]] * comm.size
    return {
        "all_reduce": lambda: comm.sum(data),
        "all_gather": lambda: comm.gather(data),
        "all_to_all": lambda: comm.all_to_all(parts, like),
        "broadcast from 0": lambda: comm.broadcast(data),
        "broadcast from the last": lambda: comm.broadcast(data, root=last),
        "send": lambda: comm.send(data, last) if comm.rank == 0 else comm.rank == last and comm.recv(data, 0),
    }


def main() -> None:
    with tw.join() as comm:
        for name, run in operations(comm).items():
            comm.barrier()
            booked, kernel = comm.ledger.rows(), sent_bytes()
            comm.barrier()  # nobody begins before all have read their counters
            run()
            comm.barrier()
            comm.barrier()
            row = {"op": name, "rank": comm.rank, "nodes": comm.nodes}
            for key in ("wire_bytes", "between_bytes"):
                row[key] = sum(r[key] for r in comm.ledger.rows()) - sum(r[key] for r in booked)
            row |= {link: count - kernel[link] for link, count in sent_bytes().items()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
