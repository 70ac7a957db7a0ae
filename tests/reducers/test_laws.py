"""Laws that every registered reducer, and every combination of them, keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import thinwire as tw
from tests.worlds import World
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.common.tensors import flatten, unflatten
from thinwire.reducers.base import Named, Reduced, ReducerState, on_reals
from thinwire.spec import parse

Shapes = list[tuple[int, ...]]
BLOCK = 512


def flat(tensors: Named) -> Tensor:
    return flatten(tensors.values(), torch.float32)


def num_elements(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def ring(num_bytes: float, ranks: int) -> int:
    return round(2 * (ranks - 1) / ranks * num_bytes)


def summed(bits: int) -> Callable[[Shapes, int], int]:
    return lambda shapes, n: ring(num_elements(shapes) * bits / 8, n)


def sum_of_int8(shapes: Shapes, n: int) -> int:
    count = num_elements(shapes)
    return ring(count, n) + ring(4 * -(-count // BLOCK), n)


def words(bits: int, block: int) -> Callable[[Shapes, int], int]:
    """Packed words to their owners and back: equal parts, of equal blocks, padded to 8 elements a block."""

    def formula(shapes: Shapes, n: int) -> int:
        part = -(-num_elements(shapes) // (8 * n)) * 8
        blocks = max(1, -(-part // block))
        width = -(-part // (8 * blocks)) * 8
        return 2 * (n - 1) * blocks * (4 + width * bits // 8) if part else 0

    return formula


def owned(bits: int, back: int) -> Callable[[Shapes, int], int]:
    """Small numbers to their owners, others back."""
    return lambda shapes, n: (n - 1) * (-(-num_elements(shapes) // (8 * n))) * (bits + back)


def scales(shapes: Shapes, n: int) -> int:
    return ring(4 * -(-num_elements(shapes) // BLOCK), n)


def drawn(ratio: float, shapes: Shapes) -> int:
    count = num_elements(shapes)
    return min(count, max(1, round(ratio * count)))


def randk(ratio: float, inner: Callable[[Shapes, int], int]) -> Callable[[Shapes, int], int]:
    return lambda shapes, n: inner([(drawn(ratio, shapes) + 1,)], n) if num_elements(shapes) else 0


def low_rank(rank: int) -> Callable[[Shapes, int], int]:
    def elements(shape: tuple[int, ...]) -> int:
        count = num_elements([shape])
        rows = shape[0] if len(shape) > 1 else 0
        return rank * (rows + count // rows) if rows and rank * (rows + count // rows) < count else count

    return lambda shapes, n: ring(4 * sum(map(elements, shapes)), n)


def matrices(formula: Callable[[Shapes, int], int]) -> Callable[[Shapes, int], int]:
    def both(shapes: Shapes, n: int) -> int:
        apart = [s for s in shapes if len(s) > 1], [s for s in shapes if len(s) <= 1]
        return formula(apart[0], n) + summed(32)(apart[1], n)

    return both


exact = summed(32)
# What each sends in its first step, by the formula in its docstring.
WIRE_BYTES: dict[str, Callable[[Shapes, int], int]] = {
    "mean": exact,
    "fp16": summed(16),
    "bf16": summed(16),
    "maxnorm": sum_of_int8,
    "maxnorm(bits=4)": words(4, 256),
    "maxnorm(bits=2)": words(2, 64),
    "maxnorm(predicted=True)": sum_of_int8,
    "maxnorm_multiscale": lambda s, n: sum_of_int8(s, n) + owned(1, 1)(s, n),
    "maxnorm_multiscale(bits=4, scales=3)": words(6, 256),
    "global_randk": randk(0.25, exact),
    "global_randk(ratio=0.5, inner=maxnorm)": randk(0.5, sum_of_int8),
    "global_randk(ratio=0.5, inner=maxnorm_multiscale(bits=2))": randk(0.5, words(3, 64)),
    "powersgd": low_rank(4),
    "powersgd(rank=1)": low_rank(1),
    "topk": lambda s, n: (n - 1) * 8 * drawn(0.1, s),
    "terngrad": lambda s, n: owned(2, 4 if n <= 7 else 8)(s, n) + scales(s, n),
    "terngrad(clip=None)": lambda s, n: owned(2, 4 if n <= 7 else 8)(s, n) + scales(s, n),
    "sign": lambda s, n: owned(1, 1)(s, n) + scales(s, n),
    "error_feedback(maxnorm(bits=2))": words(2, 64),
    "error_feedback(maxnorm(bits=4))": words(4, 256),
    "error_feedback(maxnorm(predicted=True))": sum_of_int8,
    "error_feedback(global_randk(ratio=0.01))": randk(0.01, exact),
    "error_feedback(global_randk(ratio=0.2, inner=maxnorm(bits=2)))": randk(0.2, words(2, 64)),
    "error_feedback(topk(ratio=0.05))": lambda s, n: (n - 1) * 8 * drawn(0.05, s),
    "error_feedback(terngrad)": lambda s, n: owned(2, 4 if n <= 7 else 8)(s, n) + scales(s, n),
    "error_feedback(bf16)": summed(16),
    "error_feedback(sign)": lambda s, n: owned(1, 1)(s, n) + scales(s, n),
    "partition(maxnorm)": matrices(sum_of_int8),
    "partition(powersgd(rank=2))": matrices(low_rank(2)),
    "error_feedback(partition(maxnorm(bits=2), vectors=bf16))": lambda s, n: (
        words(2, 64)([x for x in s if len(x) > 1], n) + summed(16)([x for x in s if len(x) <= 1], n)
    ),
    "error_feedback(partition(mean, vectors=maxnorm(bits=2)))": lambda s, n: (
        exact([x for x in s if len(x) > 1], n) + words(2, 64)([x for x in s if len(x) <= 1], n)
    ),
    "error_feedback(warmup(maxnorm(bits=2), steps=1))": exact,
    "warmup(maxnorm(bits=2), steps=2)": exact,
    "warmup(error_feedback(topk), steps=1)": exact,
}
SPECS = list(WIRE_BYTES)
# Where the second step sends something else.
LATER_WIRE_BYTES: dict[str, Callable[[Shapes, int], int]] = {
    "maxnorm(predicted=True)": lambda s, n: ring(num_elements(s) + 2 * -(-num_elements(s) // BLOCK), n),
    "error_feedback(maxnorm(predicted=True))": lambda s, n: ring(num_elements(s) + 2 * -(-num_elements(s) // BLOCK), n),
    "error_feedback(warmup(maxnorm(bits=2), steps=1))": words(2, 64),
    "warmup(error_feedback(topk), steps=1)": lambda s, n: (n - 1) * 8 * drawn(0.1, s),
}
shapes_ = st.lists(
    st.sampled_from([(), (0,), (0, 3), (1,), (7,), (3, 5), (2, 3, 4), (1, 9), (33, 40)]), min_size=1, max_size=5
)


def test_every_registered_reducer_is_here() -> None:
    assert {parse(spec).name for spec in SPECS} == set(registry.TABLE["reducers"])


def tensors(rank: int, seed: int, sizes: Shapes, dtype: torch.dtype = torch.float32, strided: bool = False) -> Named:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    made = {f"p{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(sizes)}
    return {n: t.t().contiguous().t() if strided and t.dim() == 2 else t for n, t in made.items()}


def reduce(comm: Comm, spec: str, given_: Named, state: ReducerState | None = None) -> Reduced:
    reducer = registry.build("reducers", spec)
    before = {name: t.clone() for name, t in given_.items()}
    old = reducer.init(given_) if state is None else state
    kept = {name: t.clone() for name, t in old.items()}
    out: Reduced = reducer.reduce(given_, old, comm)
    error = out.error()
    torch.testing.assert_close(given_, before, rtol=0, atol=0, equal_nan=True, msg="inputs were changed")
    torch.testing.assert_close(old, kept, rtol=0, atol=0, equal_nan=True, msg="the state was changed")
    assert list(out.mean) == list(error) == list(given_)
    assert all(out.mean[name].shape == t.shape == error[name].shape for name, t in given_.items())
    assert all(out.mean[name].dtype == t.dtype for name, t in given_.items())
    assert all(t.dtype == torch.float32 for t in error.values())
    assert out.state.keys() == old.keys(), "a state has the same names for ever"
    return out._replace(error=lambda: error)


def steps(comm: Comm, spec: str, given_: list[Named]) -> list[Reduced]:
    outs: list[Reduced] = []
    for now in given_:
        outs.append(reduce(comm, spec, now, outs[-1].state if outs else None))
    return outs


def same(one: Named, other: Named) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=6, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 8]), seed=st.integers(0, 9), sizes=shapes_, half=st.booleans(),
    strided=st.booleans(),
)  # fmt: skip
def test_all_ranks_get_the_same_and_it_is_the_mean_of_what_was_sent(
    spec: str, ranks: int, seed: int, sizes: Shapes, half: bool, strided: bool
) -> None:
    """Laws 1, 2, 4 and 6."""
    dtype = torch.bfloat16 if half else torch.float32

    def run(comm: Comm) -> list[tuple[Named, Reduced]]:
        given_ = [tensors(comm.rank, 10 * seed + i, sizes, dtype, strided) for i in range(2)]
        return list(zip(given_, steps(comm, spec, given_), strict=True))

    results = tw.simulate(run, ranks=ranks)
    for step in range(2):
        outs = [result[step] for result in results]
        assert all(same(outs[0][1].mean, out.mean) for _, out in outs)
        if "sign" in spec:
            continue  # a vote is not a mean
        for name, mean in outs[0][1].mean.items():
            sent = torch.stack([given_[name].double() - out.error()[name].double() for given_, out in outs])
            # 16-bit sums round at every hop; sent itself is a difference of float32 numbers
            coarse = half or "16" in spec
            tolerance = (0.01 if coarse else 1e-6) * (1 + sent.abs().max().item()) if sent.numel() else 0
            torch.testing.assert_close(mean.double(), sent.mean(0), rtol=0, atol=tolerance)


UNBIASED = [
    "maxnorm", "maxnorm(bits=4)", "maxnorm(bits=2)", "maxnorm_multiscale", "maxnorm_multiscale(bits=4, scales=3)",
    "maxnorm_multiscale(bits=2, scales=4)", "terngrad(clip=None)", "global_randk(ratio=0.3)",
    "global_randk(ratio=0.5, inner=maxnorm(bits=4))", "partition(maxnorm(bits=2))",
]  # fmt: skip


def repeated(comm: Comm, spec: str, copies: int, num_steps: int) -> tuple[Tensor, Tensor]:
    """A few values, and what many copies of each became in some steps: [value], [draw, value]."""
    own = flat(tensors(comm.rank, 3, [(40,)]))
    reducer = registry.build("reducers", spec)
    given_ = {"w": own.repeat(copies).view(copies, 40)}
    state, found = reducer.init(given_), []
    for _ in range(num_steps):
        out = reducer.reduce(given_, state, comm)
        state = out.state
        found.append(out.mean["w"])
    return own.double(), torch.cat(found).double()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("spec", UNBIASED)
def test_many_draws_give_the_mean(spec: str, ranks: int) -> None:
    """Law 3: each value's average is within five standard errors, and all together are as they should be."""
    results = tw.simulate(lambda comm: repeated(comm, spec, copies=200, num_steps=8), ranks=ranks)
    truth = torch.stack([own for own, _ in results]).mean(0)
    found = results[0][1]
    step = (found.amax(0) - found.amin(0)).max()
    standard_errors = found.std(0) / len(found) ** 0.5 + step / len(found)  # the latter for nearly whole steps
    off = (found.mean(0) - truth) / standard_errors
    assert off.abs().max() < 5, off
    assert off.square().mean() < 2.2, "too often far off"


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_maxnorm_is_no_noisier_than_the_theory_says(bits: int, ranks: int) -> None:
    """At most M²/(4s²)/n per element; for packed words, once more for the mean that comes back."""
    results = tw.simulate(lambda comm: repeated(comm, f"maxnorm(bits={bits})", copies=64, num_steps=8), ranks=ranks)
    top = max(own.abs().max().item() for own, _ in results)
    levels = 127 // ranks if bits == 8 else 2 ** (bits - 1) - 1
    bound = top**2 / (4 * levels**2) * (1 / ranks if bits == 8 else 1 / ranks + 1)
    assert results[0][1].var(0).mean() < bound
    assert results[0][1].var(0).max() < 1.3 * bound


FEEDBACK = [spec for spec in SPECS if registry.build("reducers", spec).keeps_errors and "sign" not in spec]


@pytest.mark.slow
@pytest.mark.parametrize("spec", FEEDBACK)
def test_with_feedback_what_is_lost_comes_later(spec: str) -> None:
    """Law 3: the sums of results and of gradients differ by the mean residual alone, and that does not grow."""
    sizes: Shapes = [(20, 30), (17,)]
    num_steps = 600 if "0.01" in spec else 120  # the rarer an element is sent, the longer until all is as it will be

    def run(comm: Comm) -> tuple[list[Named], list[Reduced]]:
        base = flat(tensors(99, 0, sizes))
        given_ = []
        for i in range(num_steps):
            now = tensors(comm.rank, i, sizes)
            given_.append({n: t + b for (n, t), b in zip(now.items(), _split(base, now), strict=True)})
        return given_, steps(comm, spec, given_)

    results = tw.simulate(run, ranks=3)
    gradients = torch.stack([torch.stack([flat(g) for g in given_]) for given_, _ in results]).double().mean(0)
    outputs = torch.stack([flat(out.mean) for out in results[0][1]]).double()
    behind = (gradients - outputs).cumsum(0)
    kept = torch.stack([flat(_residuals(outs[-1].state)) for _, outs in results]).double().mean(0)
    rounded_on_the_way = 1.0 if "bf16" in spec else 1e-3  # by sums in 16 bits, of which no rank knows
    torch.testing.assert_close(behind[-1], kept, rtol=1e-4, atol=rounded_on_the_way)
    size = gradients[0].norm()
    early, late = behind[num_steps // 2 - 20 : num_steps // 2].norm(dim=1).mean(), behind[-20:].norm(dim=1).mean()
    assert late < 1.25 * early + 0.1 * size, (early / size, late / size)
    assert late < num_steps / 4 * size, "most of it has arrived"


def test_feedback_keeps_what_is_lost_in_giving_the_result_its_type() -> None:
    """Gradients in bfloat16 and an exact mean: all that is lost is the rounding of results."""

    def run(comm: Comm) -> tuple[Tensor, Tensor]:
        given_ = [tensors(comm.rank, i, [(50,)], torch.bfloat16) for i in range(200)]
        outs = steps(comm, "error_feedback(mean)", given_)
        return sum((flat(g).double() for g in given_), torch.zeros(50)), sum(
            (flat(out.mean).double() for out in outs), torch.zeros(50)
        )

    results = tw.simulate(run, ranks=3)
    truth = torch.stack([own for own, _ in results]).mean(0)
    assert (results[0][1] - truth).abs().max() < 0.02, "one rounding, not two hundred"


def _split(flat: Tensor, like: Named) -> list[Tensor]:
    parts = flat.split([t.numel() for t in like.values()])
    return [part.view(t.shape) for part, t in zip(parts, like.values(), strict=True)]


def _residuals(state: ReducerState) -> Named:
    """Of all parts, by parameter; those that no part keeps are exact."""
    found = {key.rpartition("residual/")[2]: t for key, t in state.items() if "residual/" in key}
    return {name: found.get(name, torch.zeros(shape)) for name, shape in (("p0", (20, 30)), ("p1", (17,)))}


LOSSLESS = [
    "mean", "global_randk(ratio=1.0)", "topk(ratio=1.0)", "powersgd(rank=99)",
    "partition(mean)", "error_feedback(mean)", "warmup(sign, steps=2)", "error_feedback(topk(ratio=1.0))",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("spec", LOSSLESS)
def test_the_lossless_setting_gives_the_mean(spec: str, ranks: int) -> None:
    """Law 5."""

    def run(comm: Comm) -> tuple[Named, Reduced]:
        given_ = tensors(comm.rank, 1, [(3, 5), (), (0,), (33, 40)])
        return given_, steps(comm, spec, [given_] * 2)[-1]

    results = tw.simulate(run, ranks=ranks)
    for name, mean in results[0][1].mean.items():
        truth = torch.stack([given_[name] for given_, _ in results]).double().mean(0)
        torch.testing.assert_close(mean.double(), truth, rtol=1e-5, atol=1e-6)
        assert all(not out.error()[name].any() for _, out in results)


@pytest.mark.parametrize(
    "spec", ["maxnorm", "maxnorm(bits=4)", "maxnorm_multiscale", "fp16", "bf16", "terngrad(clip=None)"]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_a_whole_number_of_steps_is_exact(spec: str, ranks: int) -> None:
    """Law 5: stochastic rounding leaves whole numbers alone, always."""
    levels = {"maxnorm": 127 // ranks, "maxnorm(bits=4)": 7, "terngrad(clip=None)": 1}.get(spec, 127 // ranks)

    def run(comm: Comm) -> list[Reduced]:
        given_ = torch.arange(-levels, levels + 1.0) if comm.rank == 0 else torch.full((2 * levels + 1,), float(levels))
        return steps(comm, spec, [{"w": given_ if "bits=4" not in spec else torch.arange(-levels, levels + 1.0)}] * 20)

    for out in tw.simulate(run, ranks=ranks)[0]:
        own, others = torch.arange(-levels, levels + 1.0), float(levels)
        truth = own if "bits=4" in spec else (own + (ranks - 1) * others) / ranks
        torch.testing.assert_close(out.mean["w"], truth, rtol=1e-6, atol=1e-6)


def booked(comm: Comm, spec: str, sizes: Shapes) -> tuple[int, int]:
    first = reduce(comm, spec, tensors(comm.rank, 0, sizes))
    before = comm.ledger.wire_bytes
    reduce(comm, spec, tensors(comm.rank, 1, sizes), first.state)
    return before, comm.ledger.wire_bytes - before


@pytest.mark.parametrize("sizes", [[(1000,), (64, 50)], [(), (3, 3), (0,)], [(0,)]])
@pytest.mark.parametrize("spec", SPECS)
def test_booked_bytes_are_those_of_the_formula(spec: str, sizes: Shapes) -> None:
    """Law 7."""
    for ranks in (1, 2, 3, 4, 8):
        expected = WIRE_BYTES[spec](sizes, ranks), LATER_WIRE_BYTES.get(spec, WIRE_BYTES[spec])(sizes, ranks)
        for found in tw.simulate(lambda comm: booked(comm, spec, sizes), ranks=ranks):
            assert all(abs(one - other) <= 1 for one, other in zip(found, expected, strict=True)), (
                ranks,
                found,
                expected,
            )


@pytest.mark.parametrize("spec", SPECS)
def test_states_are_saved_and_loaded(spec: str, tmp_path: Path) -> None:
    """Law 8: after a round trip through a file the next steps are bit for bit those without."""
    sizes: Shapes = [(9, 11), (5,), ()]

    def run(comm: Comm) -> bool:
        given_ = [tensors(comm.rank, i, sizes) for i in range(6)]
        straight = steps(comm, spec, given_)
        path = tmp_path / f"{comm.rank}.safetensors"
        save_file({name: t.contiguous() for name, t in straight[2].state.items()}, path)
        out = straight[2]._replace(state=load_file(path))
        for i in range(3, 6):
            out = reduce(comm, spec, given_[i], out.state)
            if not same(out.mean, straight[i].mean) or not same(out.error(), straight[i].error()):
                return False
        return same(out.state, straight[-1].state)

    assert all(tw.simulate(run, ranks=3))


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("spec", SPECS)
def test_a_value_that_is_not_finite_on_one_rank_is_seen_on_all(spec: str, bad: float) -> None:
    """Law 9: in every step, the first one or a later one; and afterwards all is as if that step had not been."""

    def run(comm: Comm, sick_step: int, sick_rank: int) -> list[Reduced]:
        given_ = [tensors(comm.rank, i, [(8, 40), (20,)]) for i in range(4)]
        if comm.rank == sick_rank:
            given_[sick_step]["p0"][2, 3] = bad
        return steps(comm, spec, given_)

    for sick_step, sick_rank in ((0, 1), (2, 0)):
        results = tw.simulate(lambda comm, s=sick_step, r=sick_rank: run(comm, s, r), ranks=3)
        for outs in results:
            assert not outs[sick_step].mean["p0"][2, 3].isfinite()
            for i in {*range(4)} - {sick_step}:
                assert all(t.isfinite().all() for t in outs[i].mean.values()), i
            assert all(t.isfinite().all() for t in outs[-1].state.values() if t.is_floating_point())


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_give_zeros(spec: str) -> None:
    def run(comm: Comm) -> list[Reduced]:
        return steps(comm, spec, [{"a": torch.zeros(3), "b": torch.zeros(20, 30)}] * 3)

    for outs in tw.simulate(run, ranks=2):
        assert all(not t.any() for out in outs for t in out.mean.values())


@pytest.mark.parametrize("spec", SPECS)
def test_nobodys_random_numbers_are_used_up(spec: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    tw.simulate(lambda comm: steps(comm, spec, [tensors(comm.rank, 0, [(9, 40)])] * 2), ranks=2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("spec", SPECS)
def test_float64_gradients_are_reduced_too(spec: str) -> None:
    for out in tw.simulate(lambda comm: reduce(comm, spec, tensors(comm.rank, 0, [(9, 40)], torch.float64)), ranks=2):
        assert out.mean["p0"].dtype == torch.float64


def on_gloo(comm: Comm, spec: str) -> list[tuple[Named, Named]]:
    return [
        (out.mean, out.error())
        for out in steps(comm, spec, [tensors(comm.rank, i, [(31, 40), (7,)]) for i in range(3)])
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_processes_get_what_threads_get(spec: str, process_world: Any) -> None:
    """On two ranks every sum has one order, so bit for bit; on four, all ranks alike."""
    threads = tw.simulate(lambda comm: on_gloo(comm, spec), ranks=2)
    for there, here in zip(process_world.run(on_gloo, 2, spec), threads, strict=True):
        for (mean, error), (expected, lost) in zip(there, here, strict=True):
            assert same(mean, expected)
            assert same(error, lost)
    four = process_world.run(on_gloo, 4, spec)
    assert all(same(four[0][i][0], other[i][0]) for other in four for i in range(3))


@pytest.mark.parametrize("spec", SPECS)
def test_tensors_that_lie_one_after_the_other_are_reduced_as_others_are(spec: str) -> None:
    """They are read where they are, and stay as they are."""
    sizes = [(3, 5), (0,), (40,), (6, 6)]

    def run(comm: Comm) -> tuple[list[Reduced], list[Reduced]]:
        apart = [tensors(comm.rank, i, sizes) for i in range(2)]
        beside = [dict(zip(g, unflatten(flatten(g.values()), g.values()), strict=True)) for g in apart]
        return steps(comm, spec, apart), steps(comm, spec, beside)

    for apart, beside in tw.simulate(run, ranks=3):
        for one, other in zip(apart, beside, strict=True):
            assert same(one.mean, other.mean)
            assert same(one.error(), other.error())
            assert same(one.state, other.state)


@pytest.mark.parametrize("beside", [False, True])
def test_the_exact_mean_in_place_is_the_exact_mean(world: World, beside: bool) -> None:
    for expected, found, num_bytes in world(in_place, 3, beside):
        assert same(expected, found)
        assert num_bytes[0] == num_bytes[1]


def in_place(comm: Comm, beside: bool) -> tuple[Named, Named, list[int]]:
    """The exact mean of tensors of several types, as new tensors and in their own memory; and the bytes of each."""
    made = tensors(comm.rank, 1, [(33, 40), (7,), (0,), (2, 3)])
    if beside:
        made = dict(zip(made, unflatten(flatten(made.values()), made.values()), strict=True))
    given_ = {**made, "half": made["p0"].half(), "double": made["p1"].double(), "complex": torch.ones(3) * 1j}
    reducer = on_reals(registry.build("reducers", "mean"))
    before = comm.ledger.wire_bytes
    expected = reducer.reduce(given_, {}, comm).mean
    between = comm.ledger.wire_bytes
    assert reducer.in_place is not None
    reducer.in_place(given_, comm)
    return expected, given_, [between - before, comm.ledger.wire_bytes - between]
