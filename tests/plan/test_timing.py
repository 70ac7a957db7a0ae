"""How long ranks compute, where the operations of the real model are counted and a small one is timed."""

from __future__ import annotations

import time

import pytest

from thinwire.config import RunConfig
from thinwire.netlab.link import Link
from thinwire.plan import workload
from thinwire.plan.planner import study
from thinwire.plan.wire import Frames, Wire
from thinwire.tasks.synthetic import synthetic

FAST = Wire(Link(1e6), Frames(), hop_seconds=0.0)
FLOPS_PER_SECOND = 1e9


class Machine:
    """A clock of a machine on which everything takes longer, once `slowness` is more."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1

    def __call__(self) -> float:
        self.now += 1e-4 * self.slowness
        return self.now


def computing(spec: str, slowness: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds of a step that does not wait, if the machine becomes slower after the first measurements."""
    machine = Machine()
    monkeypatch.setattr(time, "perf_counter", machine)
    monkeypatch.setattr(workload, "machine_flops", lambda: FLOPS_PER_SECOND)
    config = RunConfig(epochs=2, batch_size=8, model="mlp(width=32)", lr=0.1)
    one = workload.TaskWorkload(config, synthetic(None, 0, samples=256), FLOPS_PER_SECOND)
    one.effort(2)
    machine.slowness = slowness
    forecast = study(spec, one, [0, 1], seconds=0.01).forecast(FAST)
    return forecast.seconds_per_step * (1 - forecast.waiting_share)


@pytest.mark.parametrize("spec", ["data_parallel", "data_parallel(reducer=maxnorm(bits=4))", "diloco(every=4)"])
def test_how_busy_this_machine_is_does_not_change_what_another_one_computes(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = computing(spec, 1, monkeypatch)
    assert usual > 0
    assert computing(spec, 9, monkeypatch) == pytest.approx(usual, rel=0.2)
