"""One rank of a measured run for plan_check.py: trains some epochs, and prints what the steps took and sent."""

from __future__ import annotations

import json
import sys
import time

import torch

import thinwire as tw
from thinwire import registry
from thinwire.config import RunConfig
from thinwire.netlab import sent_bytes
from thinwire.plan.workload import TaskWorkload
from thinwire.tasks.loading import load_task


def main() -> None:
    torch.set_num_threads(1)
    case = json.loads(sys.argv[1])
    config = RunConfig(**case["settings"])
    with tw.join("gloo", device="cpu") as comm:
        task = load_task(config.task, config.data, 0)
        for spec in case["specs"]:
            training = TaskWorkload(config, task).training(comm.size, case["epochs"], case["steps"])
            try:
                found = measure(spec, training, comm, case["epochs"])
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            comm.close_subgroups()
            if comm.rank == 0:
                print(json.dumps({"spec": spec, **found}), flush=True)


def measure(spec: str, training, comm, epochs: int) -> dict:
    torch.manual_seed(0)
    strategy = registry.build("strategies", spec, training.model, training.recipe, comm)
    seconds, waiting, kernel, wire = [], [], [], []
    for _ in range(epochs):
        strategy.begin_epoch(len(training.batches(strategy.shard)))
        comm.barrier()
        comm.barrier()
        before, booked = sent_bytes()["between"], between(comm)
        begin, waited = time.perf_counter(), comm.ledger.timeline.waiting_seconds
        for i, batch in enumerate(training.batches(strategy.shard)):
            with comm.ledger.timeline.step(i):
                strategy.step(batch)
        with comm.ledger.timeline.step(0):
            strategy.end_epoch()
        took, waited = time.perf_counter() - begin, comm.ledger.timeline.waiting_seconds - waited
        booked = between(comm) - booked
        comm.barrier()
        time.sleep(0.1)
        after = sent_bytes()["between"] - before
        counts = is_first(comm)
        seconds.append(comm.max(torch.tensor(took, dtype=torch.float64)).item())
        waiting.append(comm.mean(torch.tensor(waited, dtype=torch.float64)).item())
        kernel.append(int(comm.sum(torch.tensor(after if counts else 0))))
        wire.append(int(comm.sum(torch.tensor(booked))))
    return {"seconds": seconds, "waiting": waiting, "kernel": kernel, "wire": wire}


def between(comm) -> int:
    return sum(row["between_bytes"] for row in comm.ledger.rows())


def is_first(comm) -> bool:
    """Whether this rank counts for its host."""
    return comm.nodes.index(comm.nodes[comm.rank]) == comm.rank


if __name__ == "__main__":
    main()
