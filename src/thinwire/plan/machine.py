"""What this machine can do for several ranks at once: its cores, how computing slows down, and how messages wait."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import RunError
from thinwire.plan.wire import HOP_SECONDS, hops

SECONDS, MOST_PROCESSES, ANSWER_SECONDS = 0.5, 8, 60

# Each of some processes counts rounds of computing, alone (rank 0) and together, and then times small all_reduces on a
# communication thread: while nothing else runs, and while the main threads compute.
PROGRAM = """
import json, os, statistics, sys, threading, time
import torch, torch.distributed as dist
rank, size, seconds, store = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
a, x = torch.randn(256, 256), torch.randn(2**19)
def work():
    (a @ a).relu_()
    x.add_(1e-9)
def count():
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        work()
        rounds += 1
    return rounds
for _ in range(20): work()
def send(into, number=40):
    one = torch.zeros(64)
    for _ in range(number):
        begin = time.perf_counter()
        dist.all_reduce(one)
        into.append(time.perf_counter() - begin)
dist.barrier()
alone = count() if rank == 0 else 0
dist.barrier()
together = count()
dist.barrier()
idle, busy = [], []
send(idle)
thread = threading.Thread(target=send, args=(busy,))
thread.start()
while thread.is_alive(): work()
dist.barrier()
print(json.dumps([alone, together, statistics.median(idle[5:]), statistics.mean(busy[5:])]), flush=True)
"""


class Machine(NamedTuple):
    """Cores of this machine; the slowdown of a process while 1, 2, … compute, and the seconds of a hop, if it is idle
    and if its cores are busy.
    """

    cores: int
    slowdown: tuple[float, ...] = (1.0,)
    hop_seconds: float = HOP_SECONDS
    busy_hop_seconds: float = HOP_SECONDS


def measure_machine(ranks: int) -> Machine:
    """Measure with a process for each rank that shares the machine (at most one a core, and 8); takes some seconds.

    With one rank there is nothing to measure.
    """
    cores = len(os.sched_getaffinity(0))
    processes = max(2, min(MOST_PROCESSES, ranks, cores))
    if ranks == 1:
        return Machine(cores)
    alone, together, idle, busy = _measure(processes)
    slowest = max(1.0, alone / together * min(1.0, cores / processes))
    steps = tuple(1 + (slowest - 1) * k / (processes - 1) for k in range(processes))
    number = hops("all_reduce", 4, processes)
    return Machine(cores, steps, idle / number, max(idle, busy) / number)


def _measure(processes: int) -> tuple[float, float, float, float]:
    """Rounds of computing of one process alone, and of each together; seconds of an all_reduce, idle and busy."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM]
        about = [str(processes), str(SECONDS), str(Path(folder, "store"))]
        started = [
            subprocess.Popen(
                [*command, str(rank), *about], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            for rank in range(processes)
        ]
        try:
            answers = [json.loads(one.communicate(timeout=ANSWER_SECONDS)[0] or "null") for one in started]
        except subprocess.TimeoutExpired:
            answers = [None]
        finally:
            for one in started:
                one.kill()
                one.communicate()
    if None in answers:
        raise RunError("processes that measure this machine did not end; try again when it is less busy")
    together, idle, busy = (statistics.fmean(one[i] for one in answers) for i in (1, 2, 3))
    return answers[0][0], together, idle, busy
