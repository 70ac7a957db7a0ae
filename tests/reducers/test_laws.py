"""Laws that every registered reducer keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.ledger import all_reduce_bytes
from thinwire.reducers.base import Named, Reduced

REDUCERS = sorted(registry.TABLE["reducers"])
shapes = st.lists(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 3, 4)]), min_size=1, max_size=4)


def tensors(rank: int, seed: int, sizes: list[tuple[int, ...]], dtype: torch.dtype) -> Named:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return {f"p{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(sizes)}


def reduce(comm: Comm, spec: str, given_: Named) -> Reduced:
    reducer = registry.build("reducers", spec)
    before = {name: t.clone() for name, t in given_.items()}
    out: Reduced = reducer.reduce(given_, reducer.init(given_), comm)
    torch.testing.assert_close(given_, before, rtol=0, atol=0, equal_nan=True, msg="inputs were changed")
    assert list(out.mean) == list(given_)
    assert all(out.mean[name].shape == t.shape and out.mean[name].dtype == t.dtype for name, t in given_.items())
    return out


@pytest.mark.parametrize("spec", REDUCERS)
@settings(max_examples=25, deadline=None)
@given(ranks=st.sampled_from([1, 2, 3, 4, 8]), seed=st.integers(0, 9), sizes=shapes, half=st.booleans())
def test_all_ranks_get_the_same_and_it_is_the_mean_of_what_was_sent(
    spec: str, ranks: int, seed: int, sizes: list[tuple[int, ...]], half: bool
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    outs = tw.simulate(lambda comm: reduce(comm, spec, tensors(comm.rank, seed, sizes, dtype)), ranks=ranks)
    for name in outs[0].mean:
        assert all(torch.equal(outs[0].mean[name], out.mean[name]) for out in outs)
        expected = torch.stack([out.sent[name] for out in outs]).double().mean(0)
        tolerance = 0.05 if half else 1e-5
        torch.testing.assert_close(outs[0].mean[name].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", REDUCERS)
def test_a_value_that_is_not_finite_on_one_rank_is_seen_on_all(spec: str, bad: float) -> None:
    def run(comm: Comm) -> Reduced:
        given_ = tensors(comm.rank, 0, [(5,)], torch.float32)
        if comm.rank == 1:
            given_["p0"][2] = bad
        return reduce(comm, spec, given_)

    for out in tw.simulate(run, ranks=3):
        assert not out.mean["p0"][2].isfinite()


@pytest.mark.parametrize("spec", REDUCERS)
def test_zeros_give_zeros(spec: str) -> None:
    for out in tw.simulate(lambda comm: reduce(comm, spec, {"a": torch.zeros(3)}), ranks=2):
        assert out.mean["a"].tolist() == [0, 0, 0]


def test_mean_is_exact_in_one_operation_per_dtype() -> None:
    def run(comm: Comm) -> tuple[Reduced, list[dict[str, object]]]:
        given_ = {"a": torch.full((2, 3), float(comm.rank)), "b": torch.full((4,), comm.rank, dtype=torch.float64)}
        given_["c"] = torch.full((3, 2), float(comm.rank)).t()
        return reduce(comm, "mean", given_), comm.ledger.rows()

    for out, rows in tw.simulate(run, ranks=4):
        assert all(t.unique().tolist() == [1.5] for t in out.mean.values())
        assert [(r["calls"], r["payload_bytes"], r["wire_bytes"]) for r in rows] == [(2, 80, all_reduce_bytes(80, 4))]
