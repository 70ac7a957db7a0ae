"""The cost of the ledger's clocks and of the timeline, as a share of a training step, in one run.

    torchrun --nproc-per-node 2 benchmarks/timers.py [SPEC] [--model mlp] [--batch-size 16]

Rounds alternate between steps with a timeline that records everything and steps with one that has no clocks. On a busy
machine their difference is smaller than the noise. So the calls of a step are also counted, and timed by themselves.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import thinwire as tw
from thinwire import registry
from thinwire.comm.timeline import Timeline

ROUNDS, STEPS, CALLS = 30, 20, 20_000


class NoClocks(Timeline):
    """A timeline without clocks."""

    def step(self, number: int) -> Any:
        return nullcontext()

    def add_waiting(self, begin: float, end: float) -> None: ...
    def add_operation(self, op: str, begin: float, end: float, num_bytes: int) -> None: ...


class Counting(Timeline):
    """A timeline that counts the spans that it is given."""

    calls = 0

    def _keep(self, span: Any) -> None:
        self.calls += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", nargs="?", default="data_parallel")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tw.join() as comm:
        torch.manual_seed(0)
        model = registry.build("models", options.model, (1, 8, 8), 10)
        batch = torch.randn(options.batch_size, 1, 8, 8), torch.randint(0, 10, (options.batch_size,))
        trainer = tw.prepare(
            options.spec, model=model, comm=comm, loss=torch.nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, 0.01, 0.9),
        )  # fmt: skip

        def steps(timeline: Timeline) -> float:
            comm.ledger.timeline = timeline
            comm.barrier()
            begin = time.perf_counter()
            for i in range(STEPS):
                with timeline.step(i):
                    trainer.step(batch)
            return (time.perf_counter() - begin) / STEPS

        steps(Timeline())
        times: dict[type[Timeline], list[float]] = {Timeline: [], NoClocks: []}
        for turn in range(ROUNDS):
            for kind in (Timeline, NoClocks) if turn % 2 else (NoClocks, Timeline):
                timeline = kind()
                timeline.record()
                times[kind].append(steps(timeline))
        counting = Counting()
        steps(counting)
        if comm.rank == 0:
            report(options, times, counting.calls / STEPS)


def report(options: argparse.Namespace, times: dict[type[Timeline], list[float]], calls: float) -> None:
    on, off = (statistics.median(found) for found in times.values())
    print(f"{options.spec}, {options.model}, batch {options.batch_size}, torch {torch.__version__}")
    noise = math.hypot(*(1.25 * statistics.stdev(found) / len(found) ** 0.5 for found in times.values())) / off
    cost = f"{100 * (on / off - 1):+.1f} ± {100 * noise:.1f} %"
    print(f"a step takes {1e6 * on:.0f} µs with the timeline, {1e6 * off:.0f} µs without: {cost}")
    each = seconds_a_call()
    print(f"{calls:.1f} calls a step, {1e6 * each:.2f} µs each: {100 * calls * each / on:.2f} % of a step")


def seconds_a_call() -> float:
    """The seconds of the most expensive call."""
    timeline = Timeline()
    timeline.record()

    def run(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begin) / CALLS

    def step() -> None:
        with timeline.step(0):
            pass

    return max(run(step), run(lambda: timeline.add_operation("all_reduce", 0.0, 1.0, 1)))


if __name__ == "__main__":
    main()
