"""Waiting is what the computing thread does, inside a step; everything else is nobody's loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.comm.base import Comm
from thinwire.comm.timeline import Timeline

World = Callable[..., list[Any]]


def test_only_the_computing_thread_inside_a_step_waits() -> None:
    timeline = Timeline()
    timeline.add_waiting(0.0, 1.0)
    with timeline.step(1):
        timeline.add_waiting(2.0, 2.25)
        other = threading.Thread(target=timeline.add_waiting, args=(3.0, 7.0))
        other.start()
        other.join()
    timeline.add_waiting(8.0, 9.0)
    assert timeline.waiting_seconds == 0.25


def test_operations_that_overlap_are_counted_once_and_those_between_steps_are_forgotten() -> None:
    timeline = Timeline()
    timeline.add_operation("sum", 0.0, 9.0, 1)
    with timeline.step(1):
        for begin, end in ((3.0, 4.0), (1.0, 2.0), (1.5, 2.5), (1.6, 1.7)):
            timeline.add_operation("sum", begin, end, 1)
        assert timeline.operation_seconds == 2.5
    for _ in range(100):  # a loop of one's own has no steps
        timeline.add_operation("sum", 0.0, 9.0, 1)
    assert timeline.operation_seconds == 2.5


def test_spans_are_kept_between_record_and_pause_only() -> None:
    timeline = Timeline()
    for number in range(4):
        if number == 1:
            timeline.record()
        if number == 3:
            timeline.pause()
        with timeline.step(number):
            timeline.add_operation("all_reduce", time.perf_counter(), time.perf_counter() + 1, 40)
            timeline.add_waiting(5.0, 5.5)
    kept = timeline.take_rows()
    assert [(span["step"], span["kind"]) for span in kept] == [
        (1, "communication"), (1, "waiting"), (1, "step"), (2, "communication"), (2, "waiting"), (2, "step"),
    ]  # fmt: skip
    assert [span["bytes"] for span in kept] == [40, 0, 0, 40, 0, 0]
    assert abs(kept[0]["begin"] - time.time()) < 60, "in wall-clock time"
    assert kept[0]["seconds"] == 1


def late(comm: Comm) -> tuple[float, float]:
    """Rank 0 is half a second late: the others wait for it, in an operation and in one begun earlier."""
    waiting = []
    for run in (lambda: comm.sum(torch.ones(3)), lambda: comm.start_mean(torch.ones(3)).wait()):
        before = comm.ledger.timeline.waiting_seconds
        with comm.ledger.timeline.step(0):
            if comm.rank == 0:
                time.sleep(0.5)
            run()
        waiting.append(comm.ledger.timeline.waiting_seconds - before)
        comm.barrier()  # outside of a step: not counted
    return waiting[0], waiting[1]


def test_who_is_late_makes_the_others_wait(world: World) -> None:
    first, *others = world(late, 3)
    for operation in (0, 1):
        assert first[operation] < 0.3
        assert all(0.3 < other[operation] < 5 for other in others)


class Slow(nn.Module):
    """A layer that takes its time on rank 0, forward or backward."""

    def __init__(self, comm: Comm, backward: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.slow = comm.rank == 0
        self.backward = backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow and not self.backward:
            time.sleep(0.5)
        out = self.layer(x)
        if self.slow and self.backward:
            out.register_hook(lambda _: time.sleep(0.5))
        return out


def trained(comm: Comm, backward: bool, accumulate: int) -> float:
    trainer = tw.prepare(
        "data_parallel", model=Slow(comm, backward), comm=comm, accumulate=accumulate,
        optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.functional.mse_loss,
    )  # fmt: skip
    comm.barrier()
    with comm.ledger.timeline.step(0):
        trainer.step((torch.ones(4, 4), torch.ones(4, 4)))
    comm.barrier()
    return comm.ledger.timeline.waiting_seconds


def test_training_waits_for_the_slowest_rank_and_computing_is_no_waiting(world: World) -> None:
    for backward, accumulate in ((False, 1), (True, 1), (True, 2)):
        slow, fast = world(trained, 2, backward, accumulate)
        assert slow < 0.3, "it computed"
        assert 0.3 < fast < 5, "it waited"
