"""One rank of benchmarks/floor.py: measures row after row, and leaves what it found in files."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from conditions import Found
from floor_loops import HandWritten, Loop, make_batch, make_loop, make_model
from floor_results import plan
from floor_rows import BY_NAME, Row

import thinwire as tw
from thinwire.comm.collectives import all_gather_json

COMPUTE_SECONDS, MOST_COMPUTE_STEPS = 0.3, 50  # of one round of the hand-written loop
COMPUTE_ROUNDS = 2  # before a row, and again after it


def measure_rows(job: Found) -> None:
    """Measure the rows of a job. An error ends the process; the file that it leaves says why."""
    device = torch.device(job["device"], 0)  # ranks share one GPU, or the cores
    folder = Path(job["folder"])
    computing: Computing | None = None
    for number, (name, port) in enumerate(zip(job["rows"], job["ports"], strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        with tw.join("gloo", patience=job["limit"], device=device) as comm:
            try:
                computing = computing or Computing(job, device, comm)
                found = measure(BY_NAME[name], job, computing, comm, device)
                if comm.rank == 0:
                    write(folder / f"row-{number}.json", {"link": job["link"], **found})
            except BaseException as error:
                traceback.print_exc()
                sys.stderr.flush()
                write(folder / f"failed-{time.time_ns()}.json", {"failed": f"{type(error).__name__}: {error}"})
                os._exit(1)  # the others may be in the middle of an exchange


def write(path: Path, content: Any) -> None:
    """Write a file that appears when it is complete."""
    new = path.with_suffix(f".new{os.getpid()}")
    new.write_text(json.dumps(content))
    os.replace(new, path)


class Computing:
    """The hand-written loop without exchange, on all ranks at once."""

    def __init__(self, job: Found, device: torch.device, comm: tw.Comm) -> None:
        self.loop = HandWritten(make_model(job["model"]), make_batch(job["batch_size"], device, comm.rank))
        timed(self.loop, 3, device)
        self.steps = min(MOST_COMPUTE_STEPS, max(2, int(COMPUTE_SECONDS / largest(timed(self.loop, 1, device), comm))))

    def rounds(self, comm: tw.Comm, device: torch.device) -> list[float]:
        """Seconds of a step on this rank, of each round."""
        times = []
        for _ in range(COMPUTE_ROUNDS):
            comm.barrier()
            times.append(timed(self.loop, self.steps, device) / self.steps)
        return times


def measure(row: Row, job: Found, computing: Computing, comm: tw.Comm, device: torch.device) -> Found:
    """What was found of one row, on all ranks."""
    compute = computing.rounds(comm, device)
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    loop = make_loop(row, job["model"], job["batch_size"], device, comm)
    warmup = max(row.warmup, row.period)
    loop.begin(warmup + row.period if row.staged else None)
    timed(loop, warmup, device)
    comm.barrier()
    first = one_round(loop, row.period, device)
    rounds, periods = plan(job["budget"], largest(first["seconds"], comm))
    if row.staged:
        loop.end()
        loop.begin(rounds * periods * row.period)
    kept = [first] if periods == 1 and not row.staged else []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    sent_before = sent_by_kernel()
    kept += [one_round(loop, periods * row.period, device) for _ in range(rounds - len(kept))]
    sent_after = sent_by_kernel()
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    loop.end()
    del loop
    gc.collect()
    steps = (rounds - (periods == 1 and not row.staged)) * periods * row.period
    own = {
        "rounds": kept, "compute": compute + computing.rounds(comm, device), "node": comm.nodes[comm.rank],
        "by_kernel": None if sent_before is None or sent_after is None else (sent_after - sent_before) / steps,
        "memory": peak,
    }  # fmt: skip
    with comm.ledger.purpose("eval"):
        return combined(row, all_gather_json(comm, own))


def one_round(loop: Loop, steps: int, device: torch.device) -> Found:
    """Seconds and bytes of some steps, on this rank. Ranks do not wait for each other between rounds."""
    before, cpu_before = loop.sent(), time.process_time()
    seconds = timed(loop, steps, device)
    cpu_seconds = time.process_time() - cpu_before  # of all threads
    rank_bytes, between = (after - earlier for after, earlier in zip(loop.sent(), before, strict=True))
    sent = {"rank_bytes": rank_bytes, "between_bytes": between}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "steps": steps, **sent}


def combined(row: Row, by_rank: list[Found]) -> Found:
    """The results of all ranks as one: times are means over ranks, bytes those of the busiest rank and host.

    Bytes of a step are those of all rounds ÷ all steps, because ranks may take turns at sending more.
    """
    rounds = list(zip(*(rank["rounds"] for rank in by_rank), strict=True))
    computes = zip(*(rank["compute"] for rank in by_rank), strict=True)
    steps = sum(one[0]["steps"] for one in rounds)
    between: dict[int, int] = {}
    for rank in by_rank:
        own = sum(one["between_bytes"] for one in rank["rounds"])
        between[rank["node"]] = between.get(rank["node"], 0) + own
    counted = [rank["by_kernel"] for rank in by_rank if rank["by_kernel"] is not None]
    cpu_seconds = sum(one["cpu_seconds"] for rank in by_rank for one in rank["rounds"])
    return {
        "row": row.name,
        "blocks": row.blocks,
        "steps": steps,
        "rounds_ms": [round(1e3 * statistics.mean(r["seconds"] / r["steps"] for r in one), 3) for one in rounds],
        "compute_ms": [round(1e3 * statistics.mean(one), 3) for one in computes],
        "rank_bytes": round(max(sum(one["rank_bytes"] for one in rank["rounds"]) for rank in by_rank) / steps),
        "host_bytes": round(max(between.values()) / steps),
        "host_bytes_by_kernel": round(max(counted)) if counted else None,
        "cpu_ms": round(1e3 * cpu_seconds / steps / len(os.sched_getaffinity(0)), 3),
        "memory_bytes": by_rank[0]["memory"],
    }


def timed(loop: Loop, steps: int, device: torch.device) -> float:
    """Seconds of some steps, until the device has done them."""
    begin = time.perf_counter()
    for _ in range(steps):
        loop.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def largest(seconds: float, comm: tw.Comm) -> float:
    """The largest value of all ranks, so that they decide alike."""
    with comm.ledger.purpose("eval"):
        return comm.max(torch.tensor([seconds], dtype=torch.float64)).item()


def sent_by_kernel() -> int | None:
    """Bytes that this host has sent on its link, as the Linux kernel counts; None where there is no link."""
    for text in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = text.partition(":")
        if name.strip() == "wire":
            return int(counts.split()[8])
    return None
