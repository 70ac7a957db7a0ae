"""What this machine can compute: its cores, and how much processes that compute at once slow each other down."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

SECONDS, MOST_PROCESSES = 0.7, 8
PROGRAM = """
import sys, time, torch
torch.set_num_threads(1)
a, x = torch.randn(256, 256), torch.randn(2**20)
def work():
    (a @ a).relu_()
    x.add_(1e-9)
for _ in range(50): work()
print("ready", flush=True)
sys.stdin.readline()
end, count = time.perf_counter() + %f, 0
while time.perf_counter() < end:
    work()
    count += 1
print(count, flush=True)
"""


class Machine(NamedTuple):
    """Cores that this process may use, and the slowdown of one process while 1, 2, … compute, up to one a core."""

    cores: int
    slowdown: tuple[float, ...]


def measure_machine(ranks: int) -> Machine:
    """Measure with one process, and with as many as ranks share the machine (at most one a core, and 8).

    It takes some seconds; with one rank there is nothing to measure.
    """
    cores = len(os.sched_getaffinity(0))
    most = min(cores, MOST_PROCESSES, ranks)
    if most == 1:
        return Machine(cores, (1.0,))
    counts = {k: _rate(k) for k in (1, most)}
    at_most = max(1.0, counts[1] / counts[most])
    steps = [1 + (at_most - 1) * (k / max(1, most - 1)) for k in range(most)]
    return Machine(cores, tuple(steps))


def _rate(processes: int) -> float:
    """Rounds of work of each of so many processes at once."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM % SECONDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(processes)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            one.stdout.readline()
        for one in started:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        return sum(int(one.stdout.readline()) for one in started if one.stdout is not None) / processes
    finally:
        for one in started:
            one.communicate()
