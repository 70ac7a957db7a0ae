"""--compile: the same training, by a model that torch.compile made faster; refused where the model is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder

import thinwire as tw
from tests.training import MODELS, batches, seeded, spec_of, steps, trainer, weights
from tests.worlds import on_threads
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.config import RunConfig
from thinwire.exchange.overlapped import Overlapped
from thinwire.launch.settings import check_options

WIDE = seeded(0, lambda: nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 3)))
REFUSED = {"ab", "ist", "local_parallel", "pipeline"}


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_model_trains_as_one_that_is_not(autocast: bool) -> None:
    """In a process, where gradients are reduced during the backward pass; names and copies stay as they were."""
    data = batches(4)
    with tw.join() as comm, inductor_config.patch(compile_threads=1):  # a pool of threads would stay
        spec = "data_parallel(reducer=fp16, bucket_mb=1)"  # one rank with an exact reducer would need no DDP
        plain, compiled = (
            trainer(comm, spec, WIDE, compile=compile, autocast=autocast, accumulate=2) for compile in (False, True)
        )
        assert len(compiled.exchange.buckets) == 2
        assert isinstance(compiled.exchange, Overlapped)
        coarse = 1e-2 if autocast else 1e-5
        counters.clear()
        assert steps(compiled, data) == pytest.approx(steps(plain, data), rel=coarse)
        assert counters["frames"]["ok"] >= 1, "torch compiles no nn.Sequential that is called from outside"
        whole = compiled.consolidate()
        assert whole._compiled_call_impl is None
        assert compiled.state_dict()["learner"]["model"].keys() == WIDE.state_dict().keys()
        for name, value in weights(plain.consolidate()).items():
            torch.testing.assert_close(weights(whole)[name], value, rtol=coarse, atol=coarse)


def prepared(comm: Comm, spec: str) -> bool:
    return trainer(comm, spec, compile=True).model._compiled_call_impl is not None


@pytest.mark.parametrize("spec", sorted(map(spec_of, set(registry.TABLE["strategies"]) - REFUSED)))
def test_strategies_that_leave_the_model_whole_compile_it(spec: str) -> None:
    assert all(on_threads(prepared, 2, spec))


@pytest.mark.parametrize("spec", [*sorted(REFUSED), "sequence([data_parallel, ab])"])
def test_strategies_that_cut_the_model_refuse_to_compile_it(spec: str) -> None:
    culprit = "ab" if spec.startswith("sequence") else spec
    message = rf"{culprit} cuts the model or replaces its layers.*leave compile out.*data_parallel.*local_sgd"

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


def test_what_cannot_be_compiled_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(comm: Comm, message: str, spec: str) -> Any:
        with pytest.raises(tw.UsageError, match=message):
            trainer(comm, spec, compile=True)

    on_threads(refused, 1, "bucket_mb=0.5, but with compile possible: 1 or more", "data_parallel(bucket_mb=0.5)")

    def no_compiler() -> str:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", no_compiler)
    on_threads(refused, 1, r"torch finds none \(no working C\+\+ compiler\); install g\+\+", "alone")
