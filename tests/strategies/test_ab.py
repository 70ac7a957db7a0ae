"""AB-training: phases, the three ways to sync, ranks, traffic and laws of the paper, on threads and on processes."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import thinwire as tw
from tests.training import MODELS, PLAIN, batches, same, seeded, sgd, steps, trainer, weights
from tests.worlds import ProcessWorlds, World
from thinwire.comm.base import Comm
from thinwire.comm.wire_bytes import all_reduce_bytes
from thinwire.errors import RunError, UsageError
from thinwire.exchange.overlapped import Overlapped
from thinwire.strategies.ab import AB
from thinwire.strategies.ab_phases import PhaseLengths, Phases
from thinwire.surgery.lowrank import Factored, decompose, factor, set_factors
from thinwire.surgery.moments import resize_state, rotate_state

PAPER = Phases(warmup=4330, every=759, rebound=60, climb=267)
SPEC = "ab(sync_every=6, warmup=2, rebound=2, climb=0, cutoff={cutoff}, sync={sync}, group_size={group})"


def ab(comm: Comm, spec: str, model: nn.Module = MODELS[0], **options: Any) -> AB:
    strategy = trainer(comm, spec, model, **options)
    assert isinstance(strategy, AB)
    return strategy


def made(cutoff: float = 0.7, sync: str = "learned", group: int = 1) -> str:
    return SPEC.format(cutoff=cutoff, sync=sync, group=group)


# ---- phases


def test_the_published_phase_boundaries() -> None:
    starts = PAPER.starts(5400)
    assert [step for step, _ in starts] == [0, 4330, 4554, 4614, 5313, 5373]
    assert [phase for _, phase in starts] == ["warmup", "ab", "rebound", "ab", "rebound", "ab"]


def test_phases_follow_from_the_length_of_the_run() -> None:
    assert PhaseLengths(joint=0).phases(150, 48) == Phases(warmup=1518, every=759, rebound=60, climb=267), (
        "the authors' S, D and R"
    )
    assert PhaseLengths(warmup=4330, joint=0).phases(150, 48) == PAPER
    assert PhaseLengths(warmup=4330).phases(150, 48) == replace(PAPER, joint_start=5765), "half of what warm-up leaves"
    for epochs, epoch_steps in ((10, 22), (1, 40), (3, 5), (1, 3), (500, 1000)):
        phases = PhaseLengths().phases(epochs, epoch_steps)
        kinds = {phase for _, phase in phases.starts(epochs * epoch_steps)}
        all_kinds = {"warmup", "ab", "rebound", "joint"}
        assert {"warmup", "ab"} <= kinds if epochs * epoch_steps < 10 else kinds == all_kinds
        assert 1 <= phases.rebound < phases.every
    in_epochs = PhaseLengths(every=2, warmup=1.5, rebound=0.5, climb=0.1, joint=2, unit="epochs").phases(9, 20)
    assert in_epochs == Phases(warmup=30, every=40, rebound=10, climb=2, joint_start=140)


def test_a_warmup_that_ends_at_a_sync_is_followed_by_a_whole_period() -> None:
    assert Phases(10, 5, 2, 0).starts(23) == [
        (0, "warmup"),
        (10, "ab"),
        (15, "rebound"),
        (17, "ab"),
        (20, "rebound"),
        (22, "ab"),
    ]
    assert Phases(0, 5, 1, 0).starts(7) == [(0, "ab"), (5, "rebound"), (6, "ab")]
    assert Phases(11, 10, 3, 0).starts(21) == [(0, "warmup"), (11, "ab"), (20, "rebound")], "not in mid-rebound"


def phase_by_phase(comm: Comm) -> list[str]:
    strategy = ab(comm, made())
    return [strategy.phase for batch in batches(16, 8) if steps(strategy, [batch])]


def test_a_run_goes_through_its_phases(world: World) -> None:
    for phases in world(phase_by_phase, 2):
        assert phases == ["warmup"] * 2 + ["ab"] * 4 + (["rebound"] * 2 + ["ab"] * 4) * 1 + ["rebound"] * 2 + ["ab"] * 2


def learning_rates(comm: Comm) -> list[float]:
    spec = "ab(sync_every=8, warmup=2, rebound=2, climb=4, cutoff=0.7)"
    strategy = ab(comm, spec, schedule=lambda step: 1.0 if step < 12 else 1e-6)
    rates: list[float] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if optimizer is strategy.learner.optimizer:
            rates.append(optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(note)
    try:
        for batch in batches(14, 8):
            steps(strategy, [batch])
    finally:
        hook.remove()
    return rates


def test_the_learning_rate_drops_and_climbs_back_at_each_change_of_phase() -> None:
    lr, low = 0.1, 1e-5
    climb = [low + (lr - low) * i / 4 for i in range(5)]
    expected = [lr, lr, *climb, lr, *climb[:2], *climb[:2], 1e-7, 1e-7]
    assert tw.simulate(learning_rates, ranks=2)[0] == pytest.approx(expected), "never above the schedule"


def told(comm: Comm, num_steps: int | None) -> list[str]:
    strategy = ab(comm, "ab(cutoff=0.7)", epochs=2)
    found = []
    for _ in range(2):
        strategy.begin_epoch(num_steps)
        for batch in batches(20, 8):
            steps(strategy, [batch])
            found.append(strategy.phase)
        strategy.end_epoch()
    return found


def test_defaults_scale_to_the_run_and_a_length_not_told_is_found_out() -> None:
    told_before = tw.simulate(lambda comm: told(comm, 20), ranks=2)[0]
    assert told_before == [Phases(8, 4, 1, 1, joint_start=24).at(step) for step in range(40)]
    found_out = tw.simulate(lambda comm: told(comm, None), ranks=2)[0]
    assert found_out == ["warmup"] * 20 + told_before[20:], "full rank until the first epoch is over"


def epochs_of_other_lengths(comm: Comm) -> tuple[Phases | None, Phases | None, Phases | None]:
    strategy = ab(comm, "ab(cutoff=0.7)", epochs=4)
    strategy.begin_epoch(10)
    first = strategy.phases
    steps(strategy, batches(1, 8))
    strategy.begin_epoch(30)
    longer = ab(comm, "ab(cutoff=0.7)", epochs=9)
    longer.load_state_dict(strategy.state_dict())
    longer.begin_epoch(10)
    return first, strategy.phases, longer.phases


def test_phases_stay_as_they_were_planned() -> None:
    """Whatever later epochs are like, and also when a resumed run has more of them."""
    (first, *others), *_ = tw.simulate(epochs_of_other_lengths, ranks=2)
    assert first == Phases(8, 4, 1, 1, joint_start=24)
    assert others == [first, first]


def test_the_joint_phase_is_the_end_of_the_run() -> None:
    assert Phases(4, 5, 2, 0, joint_start=11).starts(99) == [
        (0, "warmup"),
        (4, "ab"),
        (5, "rebound"),
        (7, "ab"),
        (10, "rebound"),
        (11, "joint"),
    ]
    assert Phases(4, 50, 2, 0, joint_start=4).starts(9) == [(0, "warmup"), (4, "joint")]
    assert PhaseLengths(joint=30).phases(10, 20).joint_start == 170
    assert PhaseLengths(joint=1.5, unit="epochs").phases(10, 20).joint_start == 170
    assert PhaseLengths(warmup=150, joint=50).phases(10, 20).joint_start == 150, "all that the warm-up leaves"
    assert PhaseLengths(joint=0).phases(10, 20).joint_start is None
    assert PhaseLengths(every=8).phases_before_first_epoch(None) == Phases(16, 8, 1, 3), "of unknown length: none"


# ---- the joint phase


def with_joint(comm: Comm, options: str = "", model: nn.Module = MODELS[0], **more: Any) -> AB:
    """A run of 14 steps: by default 2 of warm-up, 4 in groups, 2 of rebound, 2 in groups, and 4 that are joint."""
    spec = "ab(sync_every=6, rebound=2, joint={joint}, climb={climb}, cutoff={cutoff}, warmup={warmup}{})"
    given = {"joint": 4, "climb": 0, "cutoff": 0.7, "warmup": 2} | more
    strategy = ab(comm, spec.format(options and f", {options}", **given), model, epochs=2)
    strategy.begin_epoch(7)
    return strategy


def joint_steps(comm: Comm, options: str, joint: int) -> dict[str, Any]:
    """After each step of the joint phase: parameters, and which of them a step has moved."""
    strategy, data = with_joint(comm, options, joint=joint), batches(14, 24)
    steps(strategy, data[: 14 - joint])
    before = strategy.phase
    found, moved = [], []
    for batch in data[14 - joint :]:
        old = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
        steps(strategy, [batch])
        found.append({name: p.detach().clone() for name, p in strategy.model.named_parameters()})
        moved.append({name for name, p in found[-1].items() if name not in old or not torch.equal(p, old[name])})
        assert strategy.status() == {"phase": "joint", "layer_ranks": {"3": [strategy.model[3].layer_rank, 16]}}
    assert strategy.phases is not None
    assert strategy.phase_start == 14 - joint
    return {"before": before, "found": found, "moved": moved, "groups": len(strategy.groups.ranks)}


@pytest.mark.parametrize(("joint", "before"), [(4, "ab"), (7, "rebound"), (12, "warmup"), (2, "ab")])
@pytest.mark.parametrize("options", ["", "group_size=2, moments=rotate", "moments=slice, sync=full", "sync=stale"])
def test_all_ranks_train_everything_together_in_the_joint_phase(
    world: World, options: str, joint: int, before: str
) -> None:
    ranks = world(joint_steps, 4, options, joint)
    for one in ranks:
        assert one["before"] == before
        assert {"3.up.weight", "3.down.weight", "3.up.bias", "0.weight", "5.weight"} <= one["found"][0].keys()
        for moved, parameters in zip(one["moved"], one["found"], strict=True):
            assert parameters.keys() - moved <= {"0.bias"}, "BatchNorm takes a bias away, so it has no gradient"
        assert all(map(same, one["found"], ranks[0]["found"])), "equal on all ranks, bit for bit"


@pytest.mark.parametrize(("ranks", "options"), [(1, ""), (2, "group_size=2"), (3, "group_size=1")])
def test_the_joint_phase_works_with_any_number_of_groups(ranks: int, options: str) -> None:
    found = tw.simulate(lambda comm: joint_steps(comm, options, 4), ranks=ranks)
    assert found[0]["groups"] == (3 if ranks == 3 else 1)
    assert all(same(found[0]["found"][-1], one["found"][-1]) for one in found)


def both_models(comm: Comm, joint: int) -> tuple[Tensor, Tensor, list[int], bool]:
    strategy = with_joint(comm, joint=joint)
    steps(strategy, batches(14, 24))
    whole, small = strategy.consolidate().eval(), strategy.consolidate(factored=True).eval()
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (whole, small)]
    factors = [small[3].get_parameter(f"{part}.weight") for part in ("up", "down")]
    trained = [strategy.model[3].get_parameter(f"{part}.weight") for part in ("up", "down")]
    return whole(x), small(x), sizes, all(map(torch.equal, factors, trained))


@pytest.mark.parametrize("joint", [1, 4])
def test_the_joint_phase_trains_the_factored_model_itself(world: World, joint: int) -> None:
    for whole, small, sizes, is_trained in world(both_models, 2, joint):
        torch.testing.assert_close(whole, small, rtol=1e-4, atol=1e-5)
        assert sizes[1] < sizes[0]
        assert is_trained, "not factored once more"


def without_low_ranks(comm: Comm, joint: int, warmup: int) -> bool:
    strategy = with_joint(comm, "moments=rotate", joint=joint, warmup=warmup, cutoff=0.001)
    dense = trainer(comm, "data_parallel")
    for one in (strategy, dense):
        steps(one, batches(14, 24))
    assert strategy.phase == "joint"
    assert not strategy.layer_ranks
    one, other = (dict(s.consolidate().named_parameters()) for s in (strategy, dense))
    return same(one, other)


@pytest.mark.parametrize(("joint", "warmup"), [(14, 0), (9, 5)])
def test_without_layers_of_low_rank_it_is_data_parallelism(world: World, joint: int, warmup: int) -> None:
    assert world(without_low_ranks, 2, joint, warmup) == [True, True]


def joint_traffic(comm: Comm, group: int) -> dict[str, Any]:
    strategy = with_joint(comm, f"group_size={group}")
    steps(strategy, batches(10, 24))
    before: dict[Any, int] = {}
    sent = []
    for batch in [None, *batches(4, 24)]:
        if batch is not None:
            steps(strategy, [batch])
        now = {(row["purpose"], row["link"], row["op"]): row["wire_bytes"] for row in comm.ledger.rows()}
        sent.append({key: n - before.get(key, 0) for key, n in now.items() if n != before.get(key, 0)})
        before = now
    factored = sum(p.numel() for p in strategy.model.parameters())  # N_A + N_B + N_o
    return {"sent": sent[1:], "size": factored, "rank": strategy.layer_ranks["3"]}


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (2, 1), (6, 3)])
def test_traffic_of_the_joint_phase_follows_its_formula(world: World, ranks: int, group: int) -> None:
    for one in world(joint_traffic, ranks, group):
        assert one["size"] == sum(p.numel() for p in MODELS[0].parameters()) - 16 * 16 + 2 * 16 * one["rank"]
        each = pytest.approx(all_reduce_bytes(4 * one["size"], ranks), abs=8)
        assert [step["train", "world", "all_reduce"] for step in one["sent"]] == [each] * 4
        assert all(step.keys() == {("train", "world", "all_reduce")} for step in one["sent"][1:]), "and nothing else"
        assert ("sync", "world", "all_reduce") in one["sent"][0]


def joint_rates(comm: Comm) -> list[float]:
    strategy = with_joint(comm, climb=3)
    rates = []
    for batch in batches(14, 24):
        step = strategy.learner.num_steps
        steps(strategy, [batch])
        assert strategy.phases is not None
        rates.append(strategy.phases.lr_warmup(step, strategy.phase_start))
    return rates


def test_the_learning_rate_climbs_after_the_change_to_the_joint_phase() -> None:
    third = pytest.approx(1 / 3)
    assert tw.simulate(joint_rates, ranks=2)[0][8:] == [0, third, 0, third, pytest.approx(2 / 3), 1]


def more_epochs(comm: Comm, at_step: int) -> list[str]:
    first = with_joint(comm)
    steps(first, batches(at_step, 24))
    longer = ab(comm, "ab(sync_every=6, warmup=2, rebound=2, joint=4, climb=0, cutoff=0.7)", epochs=5)
    longer.load_state_dict(first.state_dict())
    longer.begin_epoch(7)
    return [longer.phase for batch in batches(21, 24) if steps(longer, [batch])]


def test_more_epochs_than_planned_are_joint() -> None:
    assert tw.simulate(lambda comm: more_epochs(comm, 12), ranks=2) == [["joint"] * 21] * 2
    assert tw.simulate(lambda comm: more_epochs(comm, 9), ranks=2) == [["ab"] + ["joint"] * 20] * 2


# ---- the three ways to sync


def sync_once(comm: Comm, sync: str, group: int) -> dict[str, Any]:
    """Two steps of warm-up, four in which groups train separately, and what the sync makes of them."""
    strategy = ab(comm, made(sync=sync, group=group))
    data = batches(7, 24)
    steps(strategy, data[:3])
    layer = strategy.model.get_submodule("3")
    assert isinstance(layer, Factored), "a 16×16 layer of rank below 8"
    steps(strategy, data[3:6])
    one = {
        "A": layer.A.detach().clone(),
        "B": layer.B.detach().clone(),
        "role": strategy.role,
        "bias": layer.bias.detach().clone(),
    }
    consolidated = strategy.consolidate()
    factored = strategy.consolidate(factored=True)
    strategy._enter_phase("rebound")
    one |= {"W": strategy.model[3].weight.detach().clone(), "mean bias": strategy.model[3].bias.detach().clone()}
    assert torch.equal(consolidated[3].weight, one["W"]), "what a sync now would give"
    assert same(weights(consolidated), weights(strategy.consolidate()))
    thin = factored[3]
    assert type(thin) is nn.Sequential
    one["thin"] = thin.up.weight.detach() @ thin.down.weight.detach() if sync != "full" else one["W"]
    return one


@pytest.mark.parametrize(("ranks", "group"), [(2, 1), (4, 2), (4, 1), (3, 1), (6, 2)])
@pytest.mark.parametrize("sync", ["learned", "stale", "full"])
def test_a_sync_follows_its_formula(world: World, sync: str, ranks: int, group: int) -> None:
    found = world(sync_once, ranks, sync, group)
    product = {
        "learned": lambda: (
            mean(r["A"] for r in found if "A" in r["role"]) @ mean(r["B"] for r in found if "B" in r["role"])
        ),
        "stale": lambda: mean(r["A"] for r in found) @ mean(r["B"] for r in found),
        "full": lambda: mean(r["A"] @ r["B"] for r in found),
    }[sync]()
    roles = [r["role"] for r in found]
    assert roles == ["A" if rank // group % 2 == 0 else "B" for rank in range(ranks)]
    for one in found:
        torch.testing.assert_close(one["W"], product, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one["thin"], product, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one["mean bias"], mean(r["bias"] for r in found), rtol=1e-5, atol=1e-6)
        assert torch.equal(one["W"], found[0]["W"]), "all ranks are equal after a sync"


def mean(tensors: Any) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def moved(comm: Comm, sync: str) -> dict[str, Tensor]:
    """What each factor was before and after the groups trained separately, and the weight after the sync."""
    strategy = ab(comm, made(sync=sync))
    steps(strategy, batches(2, 24))
    strategy._enter_phase("ab")
    layer = strategy.model[3]
    before = layer.A.detach().clone(), layer.B.detach().clone()
    strategy.phases = Phases(0, 100, 1, 0)
    steps(strategy, batches(4, 24))
    after = layer.A.detach().clone(), layer.B.detach().clone()
    strategy._enter_phase("rebound")
    return {"A0": before[0], "B0": before[1], "A": after[0], "B": after[1], "W": strategy.model[3].weight.detach()}


def test_the_formulas_in_terms_of_what_was_learned() -> None:
    """Two groups: one moves A by ΔA, one B by ΔB, and the frozen factors stay where they were."""
    for sync in ("learned", "stale", "full"):
        first, second = tw.simulate(lambda comm, sync=sync: moved(comm, sync), ranks=2)
        a0, b0 = first["A0"], first["B0"]
        assert torch.equal(second["A"], a0)
        assert torch.equal(first["B"], b0)
        da, db = first["A"] - a0, second["B"] - b0
        assert da.norm() > 1e-3
        assert db.norm() > 1e-3
        expected = {
            "learned": (a0 + da) @ (b0 + db),
            "stale": a0 @ b0 + (da @ b0 + a0 @ db) / 2 + da @ db / 4,
            "full": a0 @ b0 + (da @ b0 + a0 @ db) / 2,
        }[sync]
        torch.testing.assert_close(first["W"], expected, rtol=1e-5, atol=1e-6)


# ---- factors


def factors(comm: Comm) -> dict[str, Any]:
    strategy = ab(comm, made(cutoff=0.6))
    steps(strategy, batches(2, 24))
    weight = strategy.model[3].weight.detach().clone()
    strategy._enter_phase("ab")
    layer = strategy.model[3]
    sigma = torch.linalg.svdvals(weight)
    return {
        "factors": (layer.A.detach().clone(), layer.B.detach().clone()), "rank": strategy.layer_ranks["3"],
        "expected": int((sigma > 0.6 * sigma[0]).sum()), "error": (layer.product() - weight).norm().item() ** 2,
        "dropped": sigma[layer.layer_rank :].square().sum().item(), "status": strategy.status(),
    }  # fmt: skip


def test_all_ranks_get_the_same_factors_cut_by_the_rule(world: World) -> None:
    found = world(factors, 3)
    for one in found:
        assert one["rank"] == one["expected"]
        assert one["error"] == pytest.approx(one["dropped"], rel=1e-4), "the best of its rank"
        assert all(map(torch.equal, one["factors"], found[0]["factors"]))
        assert one["status"] == {"phase": "ab", "layer_ranks": {"3": [one["rank"], 16]}}


def ruled(comm: Comm, rule: str) -> tuple[int, Tensor, bool]:
    """The rank that a rule gives a layer, the layer's singular values, and whether the layer was factored."""
    strategy = ab(comm, f"ab(sync_every=6, warmup=2, {rule})")
    steps(strategy, batches(2, 24))
    sigma = torch.linalg.svdvals(strategy.model[3].weight.detach().double())
    strategy._enter_phase("ab")
    return strategy.layer_ranks.get("3", 16), sigma, isinstance(strategy.model[3], Factored)


def test_layers_get_the_rank_of_the_rule(world: World) -> None:
    for rank, sigma, is_factored in world(ruled, 2, "cutoff=0.6"):
        assert sigma[rank - 1] > 0.6 * sigma[0] >= sigma[rank]
        assert is_factored
    assert [rank for rank, _, _ in world(ruled, 2, "cutoff=0.9, min_rank=6")] == [6, 6]
    for spec in ("cutoff=0.01", "cutoff=0.9, min_rank=8", "cutoff=0.9, min_rank=99"):  # 8·(16 + 16) = 16·16
        assert [is_factored for _, _, is_factored in world(ruled, 2, spec)] == [False, False]


def stays_full(comm: Comm) -> tuple[bool, dict[str, Any], bool]:
    strategy = ab(comm, made(cutoff=0.01))
    steps(strategy, batches(4, 24))
    return isinstance(strategy.model[3], nn.Linear), strategy.status(), same_type(strategy)


def same_type(strategy: AB) -> bool:
    return [type(m) for m in strategy.consolidate(factored=True)] == [type(m) for m in MODELS[0]]


def test_a_layer_that_would_gain_nothing_stays_full_and_that_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from thinwire.common import messages

    messages._said.clear()
    assert tw.simulate(stays_full, ranks=2) == [(True, {"phase": "ab", "layer_ranks": {"3": [16, 16]}}, True)] * 2
    assert "thinwire: ab: with cutoff=0.01 no layer's rank is low enough" in capsys.readouterr().err
    tw.simulate(lambda comm: ruled(comm, "cutoff=0.01, min_rank=2"), ranks=2)
    assert "ab: with cutoff=0.01 and min_rank=2 no layer's rank is low enough" in (err := capsys.readouterr().err)
    assert "try a higher cutoff, more weight decay or a longer run" in err


def spread(comm: Comm, model: nn.Module) -> set[str]:
    """The layers that this rank decomposed."""
    strategy = tw.prepare(
        made(), model=copy.deepcopy(model), optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm
    )
    weights = strategy.factoring._weights(strategy.model)
    owner = strategy.factoring._owners(weights)
    return {name for name, rank in owner.items() if rank == comm.rank}


def test_decompositions_are_shared_out_over_ranks() -> None:
    sizes = [6, 60, 60, 20, 20, 20, 20, 60, 60, 3]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    found = tw.simulate(lambda comm: spread(comm, model), ranks=4)
    assert set.union(*found) == {str(i) for i in range(1, 8)}
    assert sum(map(len, found)) == 7
    assert all(found)


def with_a_bad_weight(comm: Comm, value: float) -> str:
    strategy = ab(comm, made())
    steps(strategy, batches(2, 24))
    with torch.no_grad():
        strategy.model[3].weight[0, 0] = value
    with pytest.raises(RunError) as error:
        strategy._enter_phase("ab")
    return str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_on_every_rank(world: World, value: float) -> None:
    for message in world(with_a_bad_weight, 3, value):
        assert message.startswith("ab: the weight of layer 3 is not finite")


def with_a_singular_weight(comm: Comm, rank: int) -> tuple[int, bool]:
    strategy = ab(comm, made(cutoff=1e-3))
    strategy.phases = Phases(0, 100, 1, 0)
    with torch.no_grad():
        weight = strategy.model[3].weight
        weight.copy_(weight[:, :rank] @ weight[:rank])
    strategy._enter_phase("ab")
    steps(strategy, batches(3, 24))
    return strategy.model[3].layer_rank, all(p.isfinite().all() for p in strategy.consolidate().parameters())


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_singular_weights_are_factored(rank: int) -> None:
    assert tw.simulate(lambda comm: with_a_singular_weight(comm, rank), ranks=2) == [(max(1, rank), True)] * 2


# ---- who talks to whom


def traffic(comm: Comm, group: int) -> dict[str, Any]:
    """What each step sent, by purpose, group and operation."""
    strategy = ab(comm, made(group=group))
    before: dict[Any, int] = {}
    sent, ranks = [], []
    for batch in batches(9, 24):
        steps(strategy, [batch])
        ranks.append(strategy.layer_ranks.get("3", 16))
        now = {(row["purpose"], row["link"], row["op"]): row["wire_bytes"] for row in comm.ledger.rows()}
        sent.append({key: n - before.get(key, 0) for key, n in now.items() if n != before.get(key, 0)})
        before = now
    return {"sent": sent, "P": sum(p.numel() for p in strategy.consolidate().parameters()), "ranks": ranks}


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (2, 1), (6, 3)])
def test_traffic_follows_its_formulas(world: World, ranks: int, group: int) -> None:
    for one in world(traffic, ranks, group):
        sent, full = one["sent"], 4 * one["P"]
        others = full - 4 * 16 * 16
        for step in (0, 1, 6, 7):  # warm-up and rebound
            assert sent[step]["train", "world", "all_reduce"] == pytest.approx(all_reduce_bytes(full, ranks), abs=8)
        for step in (3, 4, 5):  # separately: one factor and the others, inside the group, and nothing else
            factor = 4 * 16 * one["ranks"][step]
            expected = {("train", "group", "all_reduce"): all_reduce_bytes(others + factor, group)} if group > 1 else {}
            assert sent[step].keys() == expected.keys()
            assert list(sent[step].values()) == pytest.approx(list(expected.values()), abs=8)
        sync = all_reduce_bytes(others + 2 * 4 * 16 * one["ranks"][5], ranks)  # A, B and all others, once
        assert sent[6]["sync", "world", "all_reduce"] == pytest.approx(sync, abs=8)
        assert one["ranks"][2] < 8


def of_purpose(comm: Comm) -> list[str]:
    """What tests of the model are booked under."""
    strategy = ab(comm, made())
    steps(strategy, batches(4, 24))
    found = []
    for purpose in ("eval", "train"):
        before = Counter(dict.fromkeys(("train", "sync", "eval"), 0))
        before.update(row["purpose"] for row in comm.ledger.rows() for _ in range(row["calls"]))
        with comm.ledger.purpose(purpose):
            strategy.consolidate(factored=True)
        now = Counter(row["purpose"] for row in comm.ledger.rows() for _ in range(row["calls"]))
        found += [name for name in now if now[name] != before[name]]
    return found


def test_a_model_that_is_tested_is_no_sync() -> None:
    assert tw.simulate(of_purpose, ranks=2) == [["eval", "sync"]] * 2


def with_a_frozen_layer(comm: Comm) -> bool:
    model = copy.deepcopy(MODELS[0])
    model[0].requires_grad_(False)
    strategy = tw.prepare(made(), model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm)
    steps(strategy, batches(4, 24))
    before = sum(row["payload_bytes"] for row in comm.ledger.rows() if row["purpose"] == "sync")
    strategy._sync_groups(strategy.model)
    sent = sum(row["payload_bytes"] for row in comm.ledger.rows() if row["purpose"] == "sync") - before
    return sent == 4 * (
        sum(p.numel() for p in strategy.model.parameters()) - sum(p.numel() for p in model[0].parameters())
    )


def test_frozen_parameters_are_not_sent() -> None:
    assert all(tw.simulate(with_a_frozen_layer, ranks=2))


def statistics(comm: Comm) -> list[tuple[Tensor, Tensor]]:
    strategy = ab(comm, made(group=2))
    found = []
    for batch in batches(10, 24):
        steps(strategy, [batch])
        found.append(
            (
                strategy.model[1].running_mean.clone(),
                dict(strategy.model.named_parameters())["0.weight"].detach().clone(),
            )
        )
    return found


def test_groups_are_equal_inside_and_differ_from_others_until_they_sync(world: World) -> None:
    found = world(statistics, 4)
    for step, ranks in enumerate(zip(*found, strict=True)):
        means, firsts = zip(*ranks, strict=True)
        separate = step in (2, 3, 4, 5, 8, 9)
        assert torch.equal(firsts[0], firsts[1])
        assert torch.equal(firsts[2], firsts[3])
        assert torch.equal(firsts[0], firsts[2]) == (not separate), f"after step {step}"
        assert len({tuple(m.tolist()) for m in means}) == 4, "BatchNorm's statistics are each rank's own"


def alone(comm: Comm) -> list[Tensor]:
    """Statistics of a rank in training: what its own data alone would give."""
    strategy = ab(comm, made(group=1))
    data = batches(6, 24)
    steps(strategy, data[:3])
    own = strategy.model[1]
    mine = copy.deepcopy(own)
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        if module is own:  # a model that is consolidated has copies of hooks
            seen.append(args[0].detach().clone())

    hook = own.register_forward_pre_hook(note)
    strategy.consolidate()
    steps(strategy, data[3:])
    hook.remove()
    for x in seen:
        mine(x)
    return [own.running_mean - mine.running_mean, own.running_var - mine.running_var]


def test_batchnorm_statistics_never_cross_groups_while_they_train_separately(world: World) -> None:
    for differences in world(alone, 2):
        assert all(not d.any() for d in differences)


Statistics = tuple[Tensor, Tensor]


def measured(model: nn.Module, inputs: list[Tensor]) -> Statistics:
    """Mean and variance of what comes into the second BatchNorm of NORMED in eval mode, the mean over batches."""
    with torch.no_grad():
        found = [model[:3](x) for x in inputs]
    return mean(x.mean(0) for x in found), mean(x.var(0) for x in found)


def _normed_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    )


NORMED = seeded(4, _normed_net)  # a layer that is factored, then BatchNorm


def normed(comm: Comm, spec: str, num_steps: int, factored: bool) -> list[Statistics]:
    """Statistics of a consolidated model: as they are, as measured on the last batches, and the mean over ranks."""
    strategy, data = ab(comm, f"ab(cutoff=0.6, {spec})", NORMED), batches(num_steps, 24)
    steps(strategy, data)
    model, own = strategy.consolidate(factored), strategy.model[3]
    averaged = [comm.mean(buffer.clone()) for buffer in (own.running_mean, own.running_var)]
    norm = model[3]
    assert (norm.num_batches_tracked, norm.momentum, norm.training) == (num_steps, 0.1, True)
    parts = [x[rank :: comm.size] for x, _ in data[-8:] for rank in range(comm.size)]
    return [(norm.running_mean, norm.running_var), measured(model, parts), (averaged[0], averaged[1])]


@pytest.mark.parametrize(
    ("ranks", "spec", "num_steps", "factored", "is_measured"),
    [
        (2, "sync_every=90, warmup=4", 10, False, True),  # no rank has trained the model that groups make together
        (4, "sync_every=90, warmup=4, sync=stale", 60, True, True),
        (2, "sync_every=90, warmup=4, sync=full", 60, True, True),
        (2, "sync_every=5, warmup=1, rebound=4", 7, False, True),  # nor has any, soon after a sync
        (2, "sync_every=90, warmup=20", 10, True, True),  # nor a copy without small singular values
        (1, "sync_every=90, warmup=20", 10, True, True),
        (2, "sync_every=90, warmup=20", 10, False, False),  # in full-rank phases all ranks train this model
        (2, "sync_every=70, warmup=1, rebound=60", 125, False, False),
        (2, "sync_every=90, warmup=4, group_size=2", 60, False, False),  # in a single group as well
        (1, "sync_every=90, warmup=4", 60, True, False),
    ],
)
def test_batchnorm_statistics_of_a_model_that_no_rank_trained_are_measured(
    world: World, ranks: int, spec: str, num_steps: int, factored: bool, is_measured: bool
) -> None:
    found = world(normed, ranks, spec, num_steps, factored)
    for statistics, anew, averaged in found:
        right, wrong = (anew, averaged) if is_measured else (averaged, anew)
        for value, expected, other in zip(statistics, right, wrong, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(value, other, rtol=1e-3)
        assert all(map(torch.equal, statistics, found[0][0])), "equal on all ranks"


def kept(comm: Comm) -> list[list[int]]:
    """Batches kept: without statistics, without calibration, of a short run, of a long one; and of a state."""
    found = []
    for model, spec, length in (
        (PLAIN, "ab(sync_every=4", 5),
        (NORMED, "ab(calibration=0, sync_every=4", 5),
        (NORMED, "ab(sync_every=4", 3),
        (NORMED, "ab(calibration=2, sync_every=4", 5),
    ):
        strategy = ab(comm, f"{spec}, warmup=1, cutoff=0.6)", model)
        steps(strategy, batches(length, 24))
        strategy.consolidate()
        after = ab(comm, f"{spec}, warmup=1, cutoff=0.6)", model)
        after.load_state_dict(strategy.state_dict())
        found += [[len(x) for x in one.inputs] for one in (strategy, after)]
    return found


def test_only_inputs_that_are_needed_are_kept() -> None:
    nothing: list[int] = []
    assert tw.simulate(kept, ranks=2) == [[nothing] * 4 + [[12] * 3] * 2 + [[12] * 2] * 2] * 2


def with_a_frozen_norm(comm: Comm) -> bool:
    strategy = ab(comm, made(cutoff=0.6), NORMED)
    strategy.model[3].eval()
    steps(strategy, batches(4, 24))
    assert strategy.phase == "ab"
    norm = strategy.consolidate()[3]
    return not norm.running_mean.any() and bool((norm.running_var == 1).all())


def test_frozen_norms_keep_their_statistics() -> None:
    assert tw.simulate(with_a_frozen_norm, ranks=2) == [True, True]


# ---- what the optimizer remembers


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


def in_rebound(comm: Comm, moments: str, optimizer: str) -> tuple[list[bool], dict[str, Tensor]]:
    spec = f"ab(sync_every=6, warmup=2, rebound=3, climb=1, cutoff=0.7, moments={moments})"
    strategy = tw.prepare(
        spec,
        model=copy.deepcopy(MODELS[0]),
        optimizer={"sgd": sgd, "adamw": adamw}[optimizer],
        loss=nn.functional.cross_entropy,
        comm=comm,
    )
    remembers = []
    for batch in batches(9, 24):
        steps(strategy, [batch])
        state = strategy.learner.optimizer.state
        remembers.append(any(s.get("step", 2) != 1 for s in state.values()))
    assert strategy.phase == "rebound"
    return remembers, weights(strategy.model)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("moments", ["rotate", "slice", "reset"])
def test_ranks_stay_equal_in_the_rebound_whatever_is_remembered(world: World, moments: str, optimizer: str) -> None:
    found = world(in_rebound, 4, moments, optimizer)
    parameters = [name for name, _ in MODELS[0].named_parameters()]
    for _, one in found:
        assert all(torch.equal(one[name], found[0][1][name]) for name in parameters)
    if optimizer == "adamw":
        assert found[0][0][6] == (moments != "reset"), "the first step of the rebound"


def remembered(comm: Comm, moments: str) -> dict[str, Any]:
    spec = f"ab(sync_every=6, warmup=2, rebound=2, cutoff=0.7, moments={moments})"
    strategy = ab(comm, spec)

    def state(name: str) -> Tensor | None:
        kept = strategy.learner.optimizer.state.get(dict(strategy.model.named_parameters())[name], {})
        buffer = kept.get("momentum_buffer")
        return None if buffer is None else buffer.clone()

    data = batches(8, 24)
    steps(strategy, data[:2])
    found = {"W": state("3.weight"), "bias": state("3.bias"), "other": state("0.weight")}
    strategy._enter_phase("ab")
    layer = strategy.model[3]
    found |= {
        "up": state("3.up.weight"),
        "down": state("3.down.weight"),
        "factors": (layer.up.weight.detach().clone(), layer.down.weight.detach().clone()),
    }
    found |= {"bias then": state("3.up.bias"), "other then": state("0.weight"), "role": strategy.role}
    steps(strategy, data[2:6])
    found["trained"] = state("3.up.weight" if strategy.role == "A" else "3.down.weight")
    strategy._enter_phase("rebound")
    found |= {"W again": state("3.weight"), "bias again": state("3.bias"), "other again": state("0.weight")}
    steps(strategy, data[6:8])
    strategy._enter_phase("ab")
    found["again"] = state("3.up.weight" if strategy.role == "A" else "3.down.weight")
    return found


def test_rotate_gives_factors_the_moments_that_their_gradients_would_have_left() -> None:
    for one in tw.simulate(lambda comm: remembered(comm, "rotate"), ranks=2):
        up, down = one["factors"]
        if one["role"] == "A":
            torch.testing.assert_close(one["up"], one["W"] @ down.T)
        else:
            torch.testing.assert_close(one["down"], up.T @ one["W"])


def test_slice_gives_factors_their_own_moments_again_cut_to_the_rank() -> None:
    for one in tw.simulate(lambda comm: remembered(comm, "slice"), ranks=2):
        assert one["up"] is None, "there was no earlier phase"
        assert one["down"] is None
        old, new = one["trained"], one["again"]
        rank = min(old.shape[one["role"] == "A"], new.shape[one["role"] == "A"])
        where = (slice(None), slice(rank)) if one["role"] == "A" else (slice(rank),)
        assert torch.equal(new[where], old[where])
        assert old[where].any()
        assert new.sum() == new[where].sum()


@pytest.mark.parametrize("moments", ["rotate", "slice"])
def test_full_rank_phases_go_on_from_where_the_last_one_ended(moments: str) -> None:
    for one in tw.simulate(lambda comm: remembered(comm, moments), ranks=2):
        for name in ("W", "bias", "other"):
            assert torch.equal(one[f"{name} again"], one[name])
        for name in ("bias", "other"):
            assert torch.equal(one[f"{name} then"], one[name])


def test_reset_forgets_everything_at_each_change() -> None:
    for one in tw.simulate(lambda comm: remembered(comm, "reset"), ranks=2):
        assert all(one[name] is None for name in ("up", "down", "bias then", "other then", "W again", "again"))


def drawn(comm: Comm) -> tuple[int, float, float]:
    """How many elements rebounds trained, with a reducer that draws a tenth of them; and a residual on both sides."""
    spec = "ab(sync_every=4, warmup=1, rebound=1, climb=0, cutoff=0.7, reducer={})"
    strategy = ab(comm, spec.format("global_randk(ratio=0.1)"))
    touched: dict[str, Tensor] = {}
    for batch in batches(40, 8):
        before = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
        steps(strategy, [batch])
        if strategy.phase == "rebound":
            strategy.learner.optimizer.state.clear()
            for name, p in strategy.model.named_parameters():
                if name in before and before[name].shape == p.shape and not name.startswith("3."):
                    touched[name] = touched.get(name, torch.zeros_like(p, dtype=torch.bool)) | (p != before[name])
    compressed = ab(comm, spec.format("error_feedback(topk(ratio=0.05))"))
    steps(compressed, batches(1, 8))

    def residual() -> float:
        states = compressed.exchange.states
        return float(sum(v.abs().sum() for s in states for k, v in s.items() if "residual/0.weight" in k))

    before_change = residual()
    compressed._enter_phase("ab")
    return sum(int(t.sum()) for t in touched.values()), before_change, residual()


def test_reducers_go_on_from_phase_to_phase() -> None:
    for touched, before, after in tw.simulate(drawn, ranks=2):
        assert touched > 3 * 0.1 * sum(p.numel() for n, p in MODELS[0].named_parameters() if not n.startswith("3."))
        assert before > 0
        assert after == before


def test_moments_of_a_rank_that_grows_or_of_another_kind() -> None:
    like = torch.zeros(4, 5)
    grown = resize_state({"exp_avg": torch.ones(4, 3), "step": torch.tensor(7.0)}, like)
    assert torch.equal(grown["exp_avg"], torch.cat([torch.ones(4, 3), torch.zeros(4, 2)], 1))
    assert grown["step"] == 7
    assert resize_state({"row_var": torch.ones(4, 1)}, like) == {}
    layer = set_factors(factor(nn.Linear(6, 6), 2), decompose(torch.randn(6, 6)))
    assert rotate_state({"row_var": torch.ones(6, 1), "step": torch.tensor(7.0)}, layer) == ({}, {})
    up, down = rotate_state({"exp_avg": torch.ones(6, 6), "step": torch.tensor(7.0)}, layer)
    assert up["step"] is not down["step"], "each optimizer counts its own steps"


# ---- results and states


def at_every_step(comm: Comm, spec: str) -> list[tuple[int, str]]:
    """Save before each of 14 steps; go on from each save to the end; which of them end elsewhere."""
    data = batches(14, 24)
    straight = ab(comm, spec, epochs=2)
    straight.begin_epoch(7)
    saved = []
    for batch in data:
        saved.append((straight.phase, copy.deepcopy(straight.state_dict())))
        steps(straight, [batch])
    end = weights(straight.consolidate()), weights(straight.model)
    wrong = []
    for i, (phase, state) in enumerate(saved):
        after = ab(comm, spec, model=MODELS[3], epochs=2)
        after.load_state_dict(state)
        steps(after, data[i:])
        if not (same(weights(after.consolidate()), end[0]) and same(weights(after.model), end[1])):
            wrong.append((i, phase))
    assert {phase for phase, _ in saved} == {"warmup", "ab", "rebound"} | ({"joint"} if "joint=5" in spec else set())
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("joint", [0, 5])
@pytest.mark.parametrize(("sync", "moments"), [("learned", "reset"), ("stale", "slice"), ("full", "rotate")])
def test_resume_in_every_phase_is_bit_exact(world: World, sync: str, moments: str, joint: int) -> None:
    spec = f"ab(sync_every=6, warmup=2, rebound=2, joint={joint}, climb=3, cutoff=0.7, sync={sync}, moments={moments})"
    assert world(at_every_step, 4, spec) == [[]] * 4


def reloaded(comm: Comm) -> str:
    """A trainer in one phase takes on the state of another."""
    strategy = ab(comm, made())
    state = copy.deepcopy(strategy.state_dict())
    steps(strategy, batches(4, 24))
    assert strategy.phase == "ab"
    thin = copy.deepcopy(strategy.state_dict())
    strategy.load_state_dict(state)
    assert isinstance(strategy.model[3], nn.Linear)
    strategy.load_state_dict(thin)
    assert isinstance(strategy.model[3], Factored)
    with pytest.raises(RunError) as error:
        ab(comm, made()).load_state_dict({**thin, "groups": [[0, 1]]})
    return str(error.value)


def test_states_of_any_phase_can_be_taken_on_and_those_of_other_groups_are_refused() -> None:
    for message in tw.simulate(reloaded, ranks=2):
        assert "use the same" in message


@pytest.mark.parametrize("group", [1, 2])
def test_resume_is_exact_with_a_reducer_that_remembers(process_world: ProcessWorlds, group: int) -> None:
    reducer = "error_feedback(maxnorm(bits=4))"
    spec = f"ab(sync_every=6, warmup=2, rebound=2, cutoff=0.7, group_size={group}, joint=5, reducer={reducer})"
    assert process_world.run(at_every_step, 4, spec) == [[]] * 4


def reading(comm: Comm, at_step: int, sync: str) -> list[str]:
    """A factored model of one whose second layer is read, not called; on rank 0 alone somebody looks at another one."""
    torch.manual_seed(0)
    strategy = tw.prepare(
        made(sync=sync), model=copy.deepcopy(READER), optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm
    )
    steps(strategy, batches(at_step, 24))
    if comm.rank == 0:
        assert strategy.model.get_submodule("mid").weight.norm() > 0
    small = strategy.consolidate(factored=True)
    small(torch.randn(2, 6))
    return list(small.state_dict())


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.read, self.mid, self.head = (
            nn.Linear(6, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(nn.functional.linear(self.first(x).relu(), self.read.weight, self.read.bias)))


READER = seeded(1, Reader)


@pytest.mark.parametrize(("at_step", "sync"), [(4, "learned"), (7, "learned"), (4, "full"), (9, "stale")])
def test_layers_that_are_read_stay_readable_and_all_ranks_agree(at_step: int, sync: str) -> None:
    found = tw.simulate(lambda comm: reading(comm, at_step, sync), ranks=2)
    assert found[0] == found[1]
    assert "read.parametrizations.weight.original" in found[0]


def looked_at(comm: Comm) -> tuple[bool, str]:
    """A convolution whose weight somebody reads: no linear layer can make its weight, so it is exported whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 8, 3), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(16, 3))
    strategy = tw.prepare(made(), model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm)
    steps(strategy, [(x[:, None], y) for x, y in batches(4, 24)])
    layer = strategy.model[1]
    assert isinstance(layer, Factored)
    assert layer.weight.norm() > 0
    whole, small = strategy.consolidate(), strategy.consolidate(factored=True)
    x = torch.randn(2, 1, 6)
    return torch.allclose(whole(x), small(x), atol=1e-6), type(small[1]).__name__


def test_a_convolution_that_is_read_stays_whole() -> None:
    assert tw.simulate(looked_at, ranks=2) == [(True, "Conv1d")] * 2


def test_a_model_that_is_refused_is_left_as_it_was() -> None:
    model = nn.ModuleDict({"at": nn.MultiheadAttention(8, 2, bias=False)})
    model["at"].requires_grad_(False)
    model["out"] = nn.Linear(8, 2)
    with tw.join() as comm, pytest.raises(UsageError, match="no layer of this model can be factored"):
        tw.prepare("ab(sync_every=9)", model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm)
    assert type(model["at"]) is nn.MultiheadAttention


def without_epochs(comm: Comm) -> None:
    strategy = ab(comm, "ab(cutoff=0.7)", epochs=2)
    steps(strategy, batches(5, 8))
    strategy.consolidate()
    ab(comm, "ab(sync_every=30, joint=0)", epochs=4).begin_epoch(20)


def test_what_will_not_happen_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from thinwire.common import messages

    messages._said.clear()
    tw.simulate(without_epochs, ranks=2)
    err = capsys.readouterr().err
    assert "ab does not know how long an epoch is after 5 steps, so it trains at full rank; write" in err
    assert "ab: groups sync every 30 steps, but the run has 80 steps, so they sync only at its end" in err


def small_and_whole(comm: Comm, at_step: int) -> dict[str, Any]:
    strategy = ab(comm, made(cutoff=0.6))
    steps(strategy, batches(at_step, 24))
    whole, small = strategy.consolidate().eval(), strategy.consolidate(factored=True).eval()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    return {
        "kinds": [type(m) for m in small.modules()], "whole": [str(m) for m in whole], "out": (whole(x), small(x)),
        "sizes": [sum(p.numel() for p in model.parameters()) for model in (whole, small)],
        "trainable": all(p.requires_grad for p in small.parameters()), "state": weights(small),
    }  # fmt: skip


@pytest.mark.parametrize("at_step", [1, 4, 7])
def test_consolidate_gives_the_ordinary_model_or_the_small_one(world: World, at_step: int) -> None:
    found = world(small_and_whole, 2, at_step)
    for one in found:
        assert one["whole"] == [str(m) for m in MODELS[0]]
        assert all(kind.__module__.startswith("torch.nn") for kind in one["kinds"])
        assert one["kinds"].count(nn.Sequential) == 2
        assert one["sizes"][1] < one["sizes"][0]
        assert one["trainable"]
        assert same(one["state"], found[0]["state"])
        if at_step == 4:  # while groups train separately, the two are the same function
            torch.testing.assert_close(*one["out"], rtol=1e-4, atol=1e-5)


def exchanges(comm: Comm) -> tuple[int, int]:
    """How many of the exchanges that were replaced are still alive."""
    strategy = ab(comm, "ab(group_size=2, sync_every=3, warmup=1, rebound=1, cutoff=0.7)")
    gc.disable()
    try:
        seen = []
        for batch in batches(9, 8):
            if not seen or seen[-1]() is not strategy.exchange:
                seen += [weakref.ref(strategy.exchange.forward), weakref.ref(strategy.exchange)]
            steps(strategy, [batch])
        alive = sum(ref() is not None for ref in seen if ref() not in (strategy.exchange, strategy.exchange.forward))
        assert isinstance(strategy.exchange, Overlapped)
        return alive, len(seen)
    finally:
        gc.enable()


def test_an_exchange_that_is_replaced_is_gone_at_once(process_world: ProcessWorlds) -> None:
    for alive, seen in process_world.run(exchanges, 4):
        assert alive == 0
        assert seen >= 10


# ---- models of other kinds


class Mixed(nn.Module):
    """Convolutions, torch's attention and a layer whose weight is read, not called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.read = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = self.conv(x.view(-1, 1, 2, 3)).flatten(2).transpose(1, 2)
        return self.head(nn.functional.linear(self.encoder(places).mean(1), self.read.weight, self.read.bias))


def mixed(comm: Comm) -> tuple[dict[str, Any], list[float], dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    strategy = tw.prepare(
        "ab(sync_every=5, warmup=2, rebound=1, climb=1, cutoff=0.7)", model=copy.deepcopy(MIXED), optimizer=adamw,
        loss=nn.functional.cross_entropy, comm=comm,
    )  # fmt: skip
    losses = steps(strategy, batches(1, 32) * 14)
    assert strategy.phase == "ab"
    whole, small = strategy.consolidate().eval(), strategy.consolidate(factored=True).eval()
    x = batches(1, 32)[0][0]
    with torch.no_grad():
        torch.testing.assert_close(whole(x), small(x), rtol=1e-4, atol=1e-5)
    return strategy.status(), losses, weights(whole), [type(m).__module__ for m in small.modules()]


MIXED = seeded(2, Mixed)


def test_convolutions_and_attention_are_factored_too(world: World) -> None:
    found = world(mixed, 2)
    for status, losses, whole, modules in found:
        names = [
            "conv.3",
            "encoder.self_attn.in_proj",
            "encoder.self_attn.out_proj",
            "encoder.linear1",
            "encoder.linear2",
            "read",
        ]
        assert list(status["layer_ranks"]) == names
        assert all(rank < largest for rank, largest in status["layer_ranks"].values())
        assert losses[-1] < losses[0]
        assert list(whole) == list(MIXED.state_dict())
        assert same(whole, found[0][2])
        assert not any(module.startswith("thinwire") for module in modules)


@pytest.mark.parametrize(("ranks", "group"), [(1, 1), (1, 4), (2, 2)])
def test_one_group_trains_both_factors(ranks: int, group: int, capsys: pytest.CaptureFixture[str]) -> None:
    def train(comm: Comm) -> tuple[str, list[bool], bool]:
        strategy = ab(comm, made(cutoff=0.6, group=group))
        losses = steps(strategy, batches(1, 48) * 3)
        before = strategy.model[3].A.detach().clone(), strategy.model[3].B.detach().clone()
        losses += steps(strategy, batches(1, 48) * 3)
        moved = [
            not torch.equal(old, new)
            for old, new in zip(before, (strategy.model[3].A, strategy.model[3].B), strict=True)
        ]
        return strategy.role, moved, losses[-1] < losses[0]

    for found in tw.simulate(train, ranks=ranks):
        assert found == ("AB", [True, True], True)
    assert "ab: there is only one group, so it trains both factors" in capsys.readouterr().err


def roles(comm: Comm, spec: str) -> tuple[str, int]:
    strategy = ab(comm, spec)
    return strategy.role, strategy.group.size


@pytest.mark.parametrize(
    ("ranks", "nodes", "spec", "expected"),
    [
        (4, 1, "ab(sync_every=9)", [("A", 2)] * 2 + [("B", 2)] * 2),
        (5, 1, "ab(sync_every=9)", [("A", 2)] * 2 + [("B", 3)] * 3),
        (6, 3, "ab(sync_every=9)", [("A", 2)] * 2 + [("B", 2)] * 2 + [("A", 2)] * 2),
        (6, 3, "ab(sync_every=9, group_size=1)", [("A", 1), ("B", 1)] * 3),
        (8, 1, "ab(sync_every=9, group_size=4)", [("A", 4)] * 4 + [("B", 4)] * 4),
    ],
)
def test_groups_are_nodes_halves_or_of_a_given_size(ranks: int, nodes: int, spec: str, expected: list[Any]) -> None:
    assert tw.simulate(lambda comm: roles(comm, spec), ranks=ranks, nodes=nodes) == expected


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("ab(group_size=3)", {}, "ab: group_size=3 does not divide 4 ranks; try 1 or 2, or leave it out"),
        ("ab(cutoff=0)", {}, "cutoff=0 is not possible: should be greater than 0"),
        ("ab(cutoff=1)", {}, "cutoff=1 is not possible: should be less than 1"),
        ("ab(cutoff=nan)", {}, "cutoff"),
        ("ab(min_rank=0)", {}, "min_rank=0 is not possible: should be greater than 0"),
        ("ab(sync=mean)", {}, "sync='mean' is not possible: should be 'learned', 'stale' or 'full'"),
        ("ab", {"epochs": None}, "ab has phases, so it must know how long the run is: prepare"),
        ("ab(unit=epochs, sync_every=1)", {"epochs": None}, "must know how long the run is"),
        (
            "ab(sync_every=5, rebound=5)",
            {},
            "ab: a rebound of 5 steps leaves none of the 5 steps between two syncs; try a shorter rebound",
        ),
        (
            "ab(sync_every=8, warmup=0.6)",
            {},
            "ab: warmup=0.6 steps; give a whole number, or ab(warmup=0.6, unit=epochs)",
        ),
        ("ab(rebound=0)", {}, "rebound=0 is not possible: should be greater than 0"),
        ("ab(sync_every=1)", {}, "ab: sync_every=1 leaves no step in which groups train separately; try 20 or more"),
        (
            "ab(sync_every=8, joint=4)",
            {"epochs": None},
            "ab: joint=4 is the length of the last phase, so ab must know how long the run is: prepare(…, epochs=90)",
        ),
        ("ab(joint=-1)", {}, "joint=-1 is not possible: should be greater than or equal to 0"),
        ("ab(sync_every=1e999)", {}, "a number is too large; possible: up to 1.7e308"),
        ("ab(sync_every=0)", {}, "sync_every=0 is not possible"),
        ("ab(moments=keep)", {}, "moments='keep' is not possible: should be 'rotate', 'slice' or 'reset'"),
    ],
)
def test_wrong_settings_are_refused_in_words(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        tw.simulate(lambda comm: trainer(comm, spec, **options), ranks=4)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "ab(warmup=40)",
            "ab: the warm-up of 40 steps is not shorter than the run of 40 (8 epochs of 5); try warmup=8, more epochs",
        ),
        (
            "ab(unit=epochs, warmup=9)",
            "the warm-up of 45 steps is not shorter than the run of 40 (8 epochs of 5); try warmup=1.6 (epochs)",
        ),
        (
            "ab(warmup=20, joint=21)",
            "ab: the warm-up of 20 steps and the joint phase of 21 are longer than the run of 40 (8 epochs of 5); try "
            "joint=8, more epochs",
        ),
        ("ab(joint=2.5)", "ab: joint=2.5 steps; give a whole number, or ab(joint=2.5, unit=epochs)"),
        ("ab(unit=epochs, sync_every=0.5, rebound=0.5)", "leaves none of the"),
        ("ab(sync_every=5, warmup=50)", "the warm-up of 50 steps is not shorter than the run of 40"),
    ],
)
def test_phases_longer_than_the_run_are_refused_before_it_begins(spec: str, message: str) -> None:
    def begin(comm: Comm) -> None:
        trainer(comm, spec).begin_epoch(5)

    with pytest.raises(UsageError) as error:
        tw.simulate(begin, ranks=2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "model", [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), nn.BatchNorm1d(6)]
)
def test_a_model_without_a_layer_to_factor_is_refused(model: nn.Module) -> None:
    with tw.join() as comm, pytest.raises(UsageError, match="ab: no layer of this model can be factored"):
        tw.prepare("ab(sync_every=9)", model=model, optimizer=sgd, loss=nn.functional.cross_entropy, comm=comm)


def residuals_of_factors(comm: Comm) -> tuple[int, float, float]:
    """Error feedback before the joint phase and at its beginning, of a layer whose rank stays the same."""
    spec = "ab(sync_every=8, warmup=2, joint=6, cutoff=0.9, min_rank=6, reducer=error_feedback(maxnorm(bits=2)))"
    strategy = trainer(comm, spec, epochs=2)
    strategy.begin_epoch(7)

    def kept() -> float:
        names = ("residual/3.up.weight", "residual/3.down.weight")
        return sum(t.norm().item() for s in strategy.exchange.states for key, t in s.items() if key.endswith(names))

    steps(strategy, batches(7, 24))
    before = kept()
    strategy._enter_phase("joint")
    return strategy.layer_ranks["3"], before, kept()


def test_new_factors_do_not_get_the_residuals_of_old_ones() -> None:
    for layer_rank, before, after in tw.simulate(residuals_of_factors, ranks=4):
        assert layer_rank == 6
        assert before > 0
        assert after == 0


def test_the_joint_phase_is_planned_after_an_epoch_of_unknown_length() -> None:
    def starts(comm: Comm) -> list[Any]:
        strategy = trainer(comm, "ab(sync_every=4, warmup=2)", epochs=4)
        before = strategy.phases.joint_start
        steps(strategy, batches(5, 24))
        strategy.end_epoch()
        return [before, strategy.phases.joint_start]

    assert tw.simulate(starts, ranks=2) == [[None, 20 - 9]] * 2
