"""Schedules at their landmarks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from tests.training import PLAIN, batches, same, steps, trainer, weights
from thinwire import registry

SCHEDULES = ["constant", "cosine", "cosine(warmup_epochs=2)", "cosine(floor=0.1)", "constant(warmup_epochs=3)"]


@given(st.sampled_from(SCHEDULES), st.floats(0, 10), st.floats(0.5, 10))
def test_factors_stay_between_zero_and_one(spec: str, done: float, total: float) -> None:
    assert 0 <= registry.build("schedules", spec)(done, total) <= 1


def test_cosine_landmarks() -> None:
    factor = registry.build("schedules", "cosine(warmup_epochs=2, floor=0.2)")
    assert factor(0, 10) == 0
    assert factor(1, 10) == pytest.approx(0.5, abs=0.01)
    assert factor(2, 10) == 1
    assert factor(6, 10) == pytest.approx(0.6)
    assert factor(10, 10) == pytest.approx(0.2)


def test_constant_warms_up() -> None:
    factor = registry.build("schedules", "constant(warmup_epochs=4)")
    assert [factor(d, 10) for d in (0, 1, 2, 4, 9)] == [0, 0.25, 0.5, 1, 1]


def test_a_warm_up_longer_than_the_run_only_climbs() -> None:
    factor = registry.build("schedules", "cosine(warmup_epochs=5)")
    assert [factor(d, 2) for d in (0.0, 1.0, 2.0)] == [0, 0.2, 0.4]


@pytest.mark.parametrize(("spec", "kind"), [("sgd(nesterov=True)", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_optimizers_take_their_options(spec: str, kind: type) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = registry.build("optimizers", spec, 0.25)([parameter])
    assert isinstance(optimizer, kind)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("spec", ["sgd", "adamw"])
def test_a_cpu_leaves_the_implementation_to_torch(spec: str) -> None:
    made = registry.build("optimizers", spec, 0.1)([torch.nn.Parameter(torch.zeros(2))])
    assert made.param_groups[0]["fused"] is None


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_loaded_state_keeps_the_implementation_of_the_optimizer(make: type[torch.optim.Optimizer]) -> None:
    """A run that began on a GPU has a fused optimizer; it may go on on a CPU, and the other way round."""
    data = batches(6)
    with tw.join() as comm:
        fused, plain, also_fused = (
            trainer(comm, "alone", PLAIN, lambda p, fused=fused: make(p, lr=0.1, fused=fused))  # type: ignore[call-arg]
            for fused in (True, None, True)
        )
        steps(fused, data[:3])
        for one, expected in ((plain, None), (also_fused, True)):
            one.load_state_dict(fused.state_dict())
            assert one.learner.optimizer.param_groups[0]["fused"] is expected
            steps(one, data[3:])
        steps(fused, data[3:])
        assert same(weights(fused.consolidate()), weights(also_fused.consolidate()))
        for name, value in weights(fused.consolidate()).items():
            torch.testing.assert_close(weights(plain.consolidate())[name], value, rtol=1e-4, atol=1e-5)
