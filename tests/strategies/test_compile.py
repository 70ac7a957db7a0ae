"""--compile: the same training, by a model that torch.compile made faster; refused where the model is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.training import MODELS, PLAIN, batches, steps, trainer, weights
from tests.worlds import on_threads
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.config import RunConfig
from thinwire.exchange.overlapped import Overlapped
from thinwire.launch.settings import check_options

REFUSED = {"ab", "ist", "local_parallel", "pipeline"}


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_model_trains_as_one_that_is_not(autocast: bool) -> None:
    """In a process, where gradients are reduced during the backward pass; names and copies stay as they were."""
    data = batches(4)
    with tw.join() as comm:
        spec = "data_parallel(reducer=fp16, bucket_mb=0.001)"  # one rank with an exact reducer would need no DDP
        plain, compiled = (
            trainer(comm, spec, PLAIN, compile=compile, autocast=autocast, accumulate=2) for compile in (False, True)
        )
        assert isinstance(compiled.exchange, Overlapped)
        coarse = 1e-2 if autocast else 1e-5
        assert steps(compiled, data) == pytest.approx(steps(plain, data), rel=coarse)
        assert compiled.model._compiled_call_impl is not None
        whole = compiled.consolidate()
        assert whole._compiled_call_impl is None
        assert compiled.state_dict()["learner"]["model"].keys() == PLAIN.state_dict().keys()
        for name, value in weights(plain.consolidate()).items():
            torch.testing.assert_close(weights(whole)[name], value, rtol=coarse, atol=coarse)


def prepared(comm: Comm, spec: str) -> bool:
    return trainer(comm, spec, compile=True).model._compiled_call_impl is not None


@pytest.mark.parametrize("spec", sorted(set(registry.TABLE["strategies"]) - REFUSED))
def test_strategies_that_leave_the_model_whole_compile_it(spec: str) -> None:
    assert all(on_threads(prepared, 2, spec))


@pytest.mark.parametrize("spec", sorted(REFUSED))
def test_strategies_that_cut_the_model_refuse_to_compile_it(spec: str) -> None:
    message = rf"{spec} cuts the model or replaces its layers.*leave compile out.*data_parallel.*local_sgd"

    def refused(comm: Comm) -> Any:
        with pytest.raises(tw.UsageError, match=message):
            tw.prepare(
                spec, model=MODELS[0], optimizer=lambda p: torch.optim.SGD(p, 0.1), comm=comm, compile=True,
                loss=nn.functional.cross_entropy,
            )  # fmt: skip

    on_threads(refused, 1)
    with pytest.raises(tw.UsageError, match=message):
        check_options(RunConfig(strategy=spec, compile=True))
    assert all(not p.is_meta for p in MODELS[0].parameters())
