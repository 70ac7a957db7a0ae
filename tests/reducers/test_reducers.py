"""What single reducers promise beyond the laws."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.reducers.test_laws import exact, flat, steps, tensors
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.common import messages
from thinwire.errors import UsageError
from thinwire.kernels import hashing
from thinwire.reducers.base import Reduced
from thinwire.reducers.global_randk import chosen_coordinates


def shapes_of(model: str) -> list[tuple[int, ...]]:
    net = registry.build("models", model, (3, 32, 32), 10)
    return [tuple(p.shape) for p in net.parameters()]


# ---- bytes


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("fp16", 0.5), ("bf16", 0.5), ("maxnorm", 0.27), ("maxnorm(bits=4)", 0.14), ("maxnorm(bits=2)", 0.08),
        ("global_randk(ratio=0.01)", 0.012), ("error_feedback(global_randk(ratio=0.01))", 0.012), ("sign", 0.035),
        ("global_randk(ratio=0.01, inner=maxnorm)", 0.003),
    ],
)  # fmt: skip
def test_bytes_against_float32_on_four_ranks(spec: str, limit: float) -> None:
    shapes = [(700, 300), (300,), (300, 300), (10, 300)]

    def run(comm: Comm) -> int:
        steps(comm, spec, [tensors(comm.rank, 0, shapes)])
        return comm.ledger.wire_bytes

    assert all(sent / exact(shapes, 4) <= limit for sent in tw.simulate(run, ranks=4))


@pytest.mark.slow
def test_powersgd_on_vgg16_sends_a_hundredth() -> None:
    shapes = shapes_of("vgg16")
    reducer = registry.build("reducers", "powersgd(rank=4)")

    def run(comm: Comm) -> list[int]:
        grads = {f"p{i}": torch.full(shape, 0.1) for i, shape in enumerate(shapes)}
        state, sent = reducer.init(grads), []
        for _ in range(2):
            before = comm.ledger.wire_bytes
            state = reducer.reduce(grads, state, comm).state
            sent.append(comm.ledger.wire_bytes - before)
        return sent

    for sent in tw.simulate(run, ranks=2):
        assert max(sent) / exact(shapes, 2) <= 0.013


@pytest.mark.parametrize("entry", registry.describe("reducers"), ids=lambda entry: entry.name)
def test_the_list_tells_the_bits_that_are_sent(entry: registry.Entry) -> None:
    assert entry.wire, "its docstring has a line 'Wire: …'"
    assert all(option.about for option in entry.options), "every option says what it does"
    depends = "as `" in entry.wire  # on another reducer
    claim = re.match(r"(\d+) bits? per element", entry.wire) or re.search(r"\(([\d.]+) on 4 ranks", entry.wire)
    if claim is None:
        assert depends or "·" in entry.wire, "if it depends on the model, there is a formula"
        return
    needs_inner = any(option.type == "Reducer" and option.default is None for option in entry.options)

    def run(comm: Comm) -> int:
        steps(comm, f"{entry.name}(sign)" if needs_inner else entry.name, [tensors(comm.rank, 0, [(64, 1024)])])
        return comm.ledger.wire_bytes

    bits = tw.simulate(run, ranks=4)[0] * 8 / (1.5 * 64 * 1024)
    assert bits == pytest.approx(float(claim[1]), rel=0.08)
    assert ("sums on the wire" in entry.wire) != ("does not sum on the wire" in entry.wire) or depends


# ---- many ranks


@pytest.mark.parametrize("name", ["maxnorm", "maxnorm_multiscale"])
def test_too_many_ranks_for_sums_of_8_bits_switch_to_packed_words_and_say_so_once(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_said", set())

    def run(comm: Comm) -> tuple[Tensor, list[Reduced], set[str]]:
        given = tensors(comm.rank, 0, [(40, 40)])
        outs = steps(comm, name, [given] * 2)
        return flat(given), outs, {row["op"] for row in comm.ledger.rows()}

    for ranks, ops in ((18, {"all_reduce"}), (19, {"all_gather", "all_to_all"})):
        results = tw.simulate(run, ranks=ranks)
        truth = torch.stack([own for own, *_ in results]).mean(0)
        assert (flat(results[0][1][1].mean) - truth).abs().max() < 0.5
        assert results[0][2] >= ops
        assert ranks < 19 or "all_reduce" not in results[0][2]
        assert capsys.readouterr().err.count(f"{name}: sums of 19 ranks leave 6 levels") == (ranks == 19)


@pytest.mark.slow
def test_terngrad_sums_are_exact_on_many_ranks() -> None:
    """130 ranks that all give ones: the sum needs more than 8 bits."""
    for out in tw.simulate(lambda comm: steps(comm, "terngrad(clip=None)", [{"w": torch.ones(9)}])[0], ranks=130):
        assert torch.equal(out.mean["w"], torch.ones(9))


# ---- single schemes


def test_an_outlier_spoils_only_its_own_block() -> None:
    def run(comm: Comm) -> Tensor:
        given = {"w": torch.full((4096,), 1e-3)}
        given["w"][3] = 1e3
        return steps(comm, "maxnorm", [given])[0].mean["w"]

    out = tw.simulate(run, ranks=2)[0]
    torch.testing.assert_close(out[512:], torch.full((4096 - 512,), 1e-3))


def test_predicted_scales_need_one_round_and_count_what_they_cut_off() -> None:
    def run(comm: Comm) -> tuple[list[int], list[int], list[Reduced]]:
        given = [{"w": size * torch.linspace(-1, 1, 600)} for size in (1.0, 1.0, 50.0, 50.0, 50.0, 50.0, 0.0, 50.0)]
        calls, cut_off, outs = [], [], []
        for i in range(len(given)):
            before = sum(row["calls"] for row in comm.ledger.rows())
            outs = steps(comm, "maxnorm(predicted=True)", given[: i + 1])
            calls.append(sum(row["calls"] for row in comm.ledger.rows()) - before)
            cut_off.append(int(outs[-1].state["saturated"]))
        return calls, cut_off, outs

    calls, cut_off, outs = tw.simulate(run, ranks=2)[0]
    assert calls[0] == 2, "the first step asks for the largest"
    assert [later - earlier for earlier, later in itertools.pairwise(calls)] == [1, 1, 1, 1, 1, 1, 2], (
        "and one after zeros"
    )
    assert cut_off[0] == cut_off[1] == 0
    assert 400 < cut_off[2] <= 600, "a jump to fifty times the size is cut off"
    assert cut_off[4] - cut_off[3] < cut_off[3] - cut_off[2] < cut_off[2]
    assert cut_off[5] == cut_off[4], "scales have grown, four times a step"
    assert not outs[6].mean["w"].any()
    assert outs[2].error()["w"].abs().max() > 40, "what was cut off is in the error"
    assert outs[7].mean["w"].abs().max() > 1, "zeros do not lock a block"


def test_multiscale_is_finer_than_one_scale() -> None:
    def run(comm: Comm, spec: str) -> float:
        given = {"w": tensors(comm.rank, 1, [(5000,)])["p0"] ** 3}
        return float(steps(comm, spec, [given])[0].error()["w"].norm())

    for bits in (4, 8):
        one = tw.simulate(lambda comm, b=bits: run(comm, f"maxnorm(bits={b})"), ranks=2)[0]
        two = tw.simulate(lambda comm, b=bits: run(comm, f"maxnorm_multiscale(bits={b})"), ranks=2)[0]
        three = tw.simulate(lambda comm, b=bits: run(comm, f"maxnorm_multiscale(bits={b}, scales=3)"), ranks=2)[0]
        assert three < two < one


@pytest.mark.parametrize(("count", "chosen"), [(10, 3), (1000, 10), (7, 7), (1, 1), (100_003, 1000)])
def test_drawn_coordinates_are_distinct_in_order_and_all_equally_likely(count: int, chosen: int) -> None:
    device = torch.device("cpu")
    hits = torch.zeros(count)
    draws = 400 if count <= 1000 else 3
    for key in range(draws):
        indices, sizes = chosen_coordinates(count, chosen, key * 7919, device)
        assert len(indices) == len(sizes) == chosen
        assert (indices.diff() > 0).all()
        assert sizes.sum() == count
        assert indices[0] >= 0
        assert indices[-1] < count
        hits[indices] += sizes
    if count <= 1000:
        spread = (count / chosen * draws) ** 0.5
        assert (hits - draws).abs().max() < 6 * spread


def test_all_ranks_draw_the_same_and_every_step_other_coordinates() -> None:
    def run(comm: Comm) -> list[Tensor]:
        outs = steps(comm, "global_randk(ratio=0.1)", [{"w": torch.ones(500)}] * 3)
        return [out.mean["w"].nonzero().view(-1) for out in outs]

    first, second = tw.simulate(run, ranks=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


def test_powersgd_finds_matrices_of_its_rank() -> None:
    """Ranks share the left space, so the sum has the rank too."""

    def run(comm: Comm) -> tuple[list[Tensor], list[Tensor], Tensor]:
        left = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))
        right = torch.randn(3, 50, generator=torch.Generator().manual_seed(comm.rank))
        outs = steps(comm, "powersgd(rank=3)", [{"w": left @ right}] * 30)
        size = (left @ right).norm()
        return [out.state["residual/w"].norm() / size for out in outs], [out.mean["w"] for out in outs], left @ right

    results = tw.simulate(run, ranks=2)
    truth = (results[0][2] + results[1][2]) / 2
    for residuals, means, _ in results:
        assert residuals[-1] < 0.2 < residuals[0], "of which nothing is missing any more: it does not change"
        assert (means[-1] - truth).norm() < 1e-3 * truth.norm()


def test_powersgd_needs_one_round_a_step() -> None:
    def run(comm: Comm) -> int:
        steps(comm, "powersgd", [tensors(comm.rank, i, [(30, 40), (30,), (30, 40), (50, 20)]) for i in range(3)])
        return sum(row["calls"] for row in comm.ledger.rows())

    assert tw.simulate(run, ranks=2) == [3, 3]


def test_powersgd_has_bases_for_parameters_not_for_places() -> None:
    reducer = registry.build("reducers", "powersgd(rank=2)")
    given = {"b.weight": torch.zeros(20, 30), "a.weight": torch.zeros(20, 30), "a.bias": torch.zeros(20)}
    state, turned = reducer.init(given), reducer.init(dict(reversed(given.items())))
    assert {"inner/left/a.weight", "inner/right/b.weight", "residual/a.bias"} <= state.keys()
    assert all(torch.equal(state[key], turned[key]) for key in state)
    assert not torch.equal(state["inner/left/a.weight"], state["inner/left/b.weight"])


def with_singular_values(values: list[float], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, 4, generator=generator, dtype=torch.float64)).Q for n in (40, 60))
    return (left @ torch.tensor(values, dtype=torch.float64).diag() @ right.mT).float()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
@pytest.mark.parametrize(
    "values",
    [[1, 0.9, 0.8, 0.7], [1, 1e-2, 1e-4, 1e-6], [1, 1e-3, 0, 0], [1, 0, 0, 0], [1, 1e-7, 1e-7, 1e-7], [0, 0, 0, 0]],
)
def test_bases_of_powersgd_are_orthonormal_however_dependent_gradients_are(values: list[float], size: float) -> None:
    def run(comm: Comm) -> list[Reduced]:
        given = [{"w": size * with_singular_values(values, seed=i // 3), "other": torch.ones(9, 50)} for i in range(12)]
        return steps(comm, "powersgd(rank=4)", given)

    for out in tw.simulate(run, ranks=2)[0]:
        for key, basis in out.state.items():
            if "left" in key or "right" in key:
                off = basis.double().mT @ basis.double() - torch.eye(4)
                assert off.abs().max() < 1e-5, (key, off)


@pytest.mark.parametrize(
    ("bad", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.float32), (65504.0, torch.float16)]
)
def test_a_step_that_is_not_finite_leaves_powersgd_as_it_was(bad: float, dtype: torch.dtype) -> None:
    """Residuals and bases; also if the mean with the residual is beyond the type of the gradients alone."""

    def run(comm: Comm) -> list[Reduced]:
        given = [tensors(comm.rank, i, [(20, 30), (20, 30), (7,)], dtype) for i in range(4)]
        given[2]["p0"].fill_(bad / 4)
        given[3]["p0"].fill_(bad)
        return steps(comm, "powersgd(rank=2)", given)

    for outs in tw.simulate(run, ranks=2):
        sick = [i for i, out in enumerate(outs) if not out.mean["p0"].isfinite().all()]
        assert sick[-1] == 3
        before, after = outs[sick[0] - 1].state, outs[3].state
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "mean", "maxnorm(bits=4)", "error_feedback(topk(ratio=0.2))"])
def test_the_order_of_memory_on_a_rank_changes_nothing(spec: str) -> None:
    """A rank with a GPU may have channels_last gradients, and one without has not."""

    def run(comm: Comm, differing: bool) -> Reduced:
        given = tensors(comm.rank, 1, [(16, 8, 3, 3)])
        if differing and comm.rank:
            given = {name: t.to(memory_format=torch.channels_last) for name, t in given.items()}
        return steps(comm, spec, [given] * 3)[-1]

    expected, *outs = (
        out for differing in (False, True) for out in tw.simulate(lambda comm, d=differing: run(comm, d), ranks=2)
    )
    assert all(torch.equal(out.mean["p0"], expected.mean["p0"]) for out in outs)


def test_majority_wins_and_ties_fall_both_ways() -> None:
    def run(comm: Comm) -> Tensor:
        mine = torch.ones(1000) * (1.0 if comm.rank == 0 else -1.0)
        return steps(comm, "sign", [{"w": mine}])[0].mean["w"]

    assert torch.equal(tw.simulate(run, ranks=3)[0], -torch.ones(1000))
    assert 400 < (tw.simulate(run, ranks=2)[0] > 0).sum() < 600


def test_warmup_is_exact_for_so_many_steps_and_partition_for_vectors() -> None:
    def run(comm: Comm) -> tuple[list[Reduced], Reduced, list[Tensor]]:
        given = [tensors(comm.rank, i, [(30, 30), (30,)]) for i in range(4)]
        parts = steps(comm, "partition(maxnorm(bits=2))", given)
        return steps(comm, "warmup(maxnorm(bits=2), steps=3)", given), parts[0], [flat(g) for g in given]

    results = tw.simulate(run, ranks=2)
    for step in range(4):
        truth = torch.stack([given[step] for *_, given in results]).mean(0)
        found = flat(results[0][0][step].mean)
        assert torch.allclose(found, truth, atol=1e-6) == (step < 3)
    truth = torch.stack([given[0] for *_, given in results]).mean(0)
    matrices, vectors = results[0][1].mean["p0"], results[0][1].mean["p1"]
    torch.testing.assert_close(vectors, truth[-30:])
    assert not torch.allclose(matrices.view(-1), truth[:-30], atol=1e-3)


def test_a_step_that_is_not_finite_leaves_feedback_as_it_was() -> None:
    """As if the step had not been: a loss scaler skips it too."""

    def run(comm: Comm, sick: bool) -> Reduced:
        given = [tensors(comm.rank, i, [(20, 30)]) for i in range(4)]
        if sick:
            bad = {"p0": torch.full((20, 30), float("nan") if comm.rank == 0 else 1.0)}
            given = [*given[:2], bad, *given[2:]]
        return steps(comm, "error_feedback(maxnorm(bits=2))", given)[-1]

    well = tw.simulate(lambda comm: run(comm, False), ranks=2)
    after = tw.simulate(lambda comm: run(comm, True), ranks=2)
    assert all(torch.equal(a.mean["p0"], b.mean["p0"]) for a, b in zip(well, after, strict=True))


def test_buckets_with_equal_data_are_rounded_otherwise() -> None:
    def run(comm: Comm) -> list[Tensor]:
        data = torch.linspace(-1, 1, 400)
        return [steps(comm, spec, [{name: data}])[0].error()[name] for name in ("a", "b") for spec in specs]

    specs = ["maxnorm(bits=4)", "global_randk(ratio=1.0, inner=maxnorm(bits=4))"]
    plain_a, drawn_a, plain_b, drawn_b = tw.simulate(run, ranks=2)[0]
    assert not torch.equal(plain_a, plain_b)
    assert not torch.equal(drawn_a, drawn_b)


def test_coins_fall_otherwise_in_the_next_step() -> None:
    def run(comm: Comm) -> list[Reduced]:
        return steps(comm, "sign", [{"w": torch.ones(500) * (1 - 2 * comm.rank)}] * 2)

    first, second = tw.simulate(run, ranks=2)[0]
    assert 150 < (first.mean["w"] != second.mean["w"]).sum() < 350


@pytest.mark.parametrize("count", [100, 512, 700])
def test_terngrad_cuts_off_at_so_many_standard_deviations(count: int) -> None:
    def run(comm: Comm) -> Tensor:
        x = torch.ones(count)
        x[-1] = 50.0
        return steps(comm, "terngrad(clip=2.0)", [{"w": x}])[0].mean["w"].max()

    last = torch.ones(count)
    last[-1] = 50.0
    block = last[512:] if count > 512 else last
    expected = 2.0 * block.square().mean().sqrt()
    assert tw.simulate(run, ranks=1)[0] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e25, 1e38])
@pytest.mark.parametrize(
    "spec", ["maxnorm", "maxnorm(predicted=True)", "maxnorm_multiscale", "terngrad", "error_feedback(maxnorm(bits=4))",
             "global_randk(ratio=0.5)", "powersgd(rank=1)", "topk"],
)  # fmt: skip
def test_very_small_and_very_large_gradients_are_gradients(spec: str, size: float) -> None:
    def run(comm: Comm) -> list[Reduced]:
        large = tensors(comm.rank, 0, [(20, 30)])["p0"].clamp(-1, 1) * size
        return steps(comm, spec, [{"w": large}] * 3 + [{"w": torch.ones(20, 30)}] * 30)

    outs = tw.simulate(run, ranks=2)[0]
    if not (size == 1e38 and ("powersgd" in spec or "randk" in spec)):  # sums and multiples of those are beyond float32
        assert all(out.mean["w"].isfinite().all() and out.mean["w"].any() for out in outs[:3])
        assert outs[2].mean["w"].abs().max() > 0.01 * size
    if "feedback" not in spec and "powersgd" not in spec:  # those still deliver what came before
        assert all(out.mean["w"].isfinite().all() for out in outs[3:])
        if spec == "maxnorm(predicted=True)" and size == 1e-30:
            return  # its scales grow fourfold a step
        assert outs[-1].mean["w"].mean() == pytest.approx(1.0, abs=0.95)


def test_powersgd_recovers_from_zeros_where_unit_vectors_would_never_meet_a_gradient() -> None:
    def run(comm: Comm) -> list[Reduced]:
        rest = [tensors(comm.rank, i, [(40, 50)])["p0"] + 1 for i in range(20)]
        for gradient in rest:
            gradient[:4] = 0
            gradient[:, :4] = 0
        return steps(comm, "powersgd(rank=4)", [{"w": torch.zeros(40, 50)}] + [{"w": g} for g in rest])

    outs = tw.simulate(run, ranks=2)[0]
    assert all(out.mean["w"].any() for out in outs[2:])
    assert outs[-1].state["residual/w"].norm() < 200


@pytest.mark.parametrize("ranks", [1, 4])
def test_two_bits_with_feedback_are_behind_by_less_than_a_gradient(ranks: int) -> None:
    """And results are about as large as gradients: Adam divides by their size, and would take smaller steps."""

    def run(comm: Comm) -> tuple[Tensor, Tensor]:
        common = tensors(99, 0, [(64, 100)])["p0"]
        given = [{"w": common + tensors(comm.rank, i, [(64, 100)])["p0"]} for i in range(30)]
        outs = steps(comm, "error_feedback(maxnorm(bits=2))", given)
        return torch.stack([g["w"] for g in given]), torch.stack([out.mean["w"] for out in outs])

    results = tw.simulate(run, ranks=ranks)
    gradients = torch.stack([given for given, _ in results]).mean(0).flatten(1)
    means = results[0][1].flatten(1)
    behind = (gradients - means).cumsum(0)
    assert behind[-10:].norm(dim=1).max() < gradients[-10:].norm(dim=1).min()
    assert means[-10:].norm(dim=1).mean() < 1.3 * gradients[-10:].norm(dim=1).mean()


def test_predicted_scales_do_not_drown_small_blocks() -> None:
    def run(comm: Comm) -> list[Reduced]:
        given = {"w": torch.cat([torch.full((512,), 1e5), torch.ones(512)])}
        return steps(comm, "maxnorm(predicted=True)", [given] * 4)

    for out in tw.simulate(run, ranks=2)[0]:
        assert out.mean["w"][512:].sub(1).abs().max() < 0.2


# ---- mistakes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("maxnorm(bits=0)", "bits=0 is not possible: should be 2, 4 or 8"),
        ("maxnorm(bits=16)", "should be 2, 4 or 8"),
        ("maxnorm(block=0)", "greater than or equal to 8"),
        ("maxnorm(block=12)", "multiple of 8"),
        ("maxnorm(bits=4, predicted=True)", "try bits=8"),
        ("maxnorm_multiscale(scales=1)", "greater than or equal to 2"),
        ("global_randk(ratio=2)", "ratio=2 is not possible: should be less than or equal to 1"),
        ("global_randk(ratio=0)", "greater than 0"),
        ("topk(ratio=-1)", "greater than 0"),
        ("powersgd(rank=0)", "rank=0 is not possible: should be greater than or equal to 1"),
        ("terngrad(clip=0)", "greater than 0"),
        ("warmup(sign, steps=-1)", "greater than or equal to 0"),
        ("error_feedback", "inner is missing; give a reducer, for example error_feedback(maxnorm)"),
        ("error_feedback(inner=4)", "is not a reducer"),
        ("error_feedback(maxnrm)", "did you mean 'maxnorm'"),
        ("error_feedback(error_feedback(sign))", "would count that twice; use it alone"),
        ("error_feedback(powersgd)", "count that twice"),
        ("error_feedback(warmup(powersgd))", "count that twice"),
        ("error_feedback(partition(powersgd))", "count that twice"),
        ("global_randk(inner=powersgd)", "put error_feedback around it"),
        ("global_randk(0.1, mean, 3)", "3 values given, takes at most 2"),
    ],
)
def test_mistakes_are_explained(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        registry.build("reducers", spec)


def test_random_numbers_are_numbers_between_0_and_1_for_every_key() -> None:
    for key in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        numbers = hashing.uniform(1000, key, torch.device("cpu"))
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert numbers.mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    "spec",
    ["maxnorm", "maxnorm(bits=4)", "maxnorm(bits=2)", "maxnorm(predicted=True)", "maxnorm_multiscale", "terngrad"],
)
def test_gradients_near_the_end_of_float32_are_not_taken_for_zero(spec: str) -> None:
    def run(comm: Comm) -> float:
        reducer = registry.build("reducers", spec)
        gradients = {"w": torch.full((4096,), 1e-37)}
        state, total = reducer.init(gradients), 0.0
        for _ in range(12):
            out = reducer.reduce(gradients, state, comm)
            state, total = out.state, total + out.mean["w"].double().mean().item()
        return total / 12

    for mean in tw.simulate(run, ranks=2):
        assert abs(mean / 1e-37 - 1) < 0.1
