"""Laws of sequences: one part is that strategy; seams, resume, bytes, learning rates; what cannot follow is refused."""

from __future__ import annotations

import copy
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire as tw
from tests.strategies.test_laws import VARIANTS
from tests.training import DEEP, MODELS, adamw, batches, epochs, same, seeded, sgd, steps, trainer, weights
from tests.worlds import ProcessWorlds, World, on_threads, worlds
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.dry import DryComm
from thinwire.config import RunConfig
from thinwire.errors import RunError, UsageError
from thinwire.run.records import read_rows
from thinwire.run.worker import Run
from thinwire.spec import parse
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.sequence_parts import plan_parts
from thinwire.strategies.sequence_recipes import Seam, recipe_of
from thinwire.surgery.low_rank_model import find_low_rank_layers, give_low_rank_layers, merge_low_rank_layers

EPOCH = 3  # steps
AB = "ab(sync_every=3, warmup=1, cutoff=0.7)"
PAIRS = [
    ("data_parallel", "local_sgd(every=2)"),
    ("local_sgd(every=2)", "data_parallel(reducer=error_feedback(maxnorm(bits=4)))"),
    ("diloco(every=4, fragments=2)", "daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=0)"),
    ("daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=1)", "ist(local_steps=2)"),
    (AB, "data_parallel(reducer=maxnorm(bits=4))"),
    (AB, "local_sgd(every=2)"),
    ("ist(local_steps=2)", "local_sgd(every=2)"),
    ("local_parallel(blocks=1)", AB),
]


def spec_of(*parts: str, lengths: str = "[2, 2]", **options: Any) -> str:
    more = "".join(f", {name}={value}" for name, value in options.items())
    return f"sequence([{', '.join(parts)}], {lengths}{more})"


def factors(step: int) -> float:
    return 0.9**step


def prepared(comm: Comm, spec: str, model: nn.Module = MODELS[0], **options: Any) -> Any:
    return trainer(comm, spec, model, epochs=4, **options)


# ---- one part


def losses_weights_and_bytes(comm: Comm, spec: str) -> tuple[list[float], dict[str, Tensor], int]:
    strategy = trainer(comm, spec, schedule=factors)
    losses = steps(strategy, batches(5, 24))
    strategy.end_epoch()
    losses += steps(strategy, batches(4, 24, seed=2))
    strategy.end_epoch()  # what is in flight is sent, and so in the ledger
    probe = {"start"} if spec.startswith(("auto", "sequence([auto")) else set()  # it sends for as long as it may take
    sent = sum(row["wire_bytes"] for row in comm.ledger.rows() if row["purpose"] not in probe)
    return losses, weights(strategy.consolidate()), sent


@worlds(threads=[1, 3], processes=[2])
@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if not spec.startswith("sequence")])
def test_a_sequence_of_one_part_is_that_strategy(world: World, spec: str, ranks: int) -> None:
    alone = world(losses_weights_and_bytes, ranks, spec)
    wrapped = world(losses_weights_and_bytes, ranks, f"sequence([{spec}])")
    for (losses, model, sent), (own_losses, own_model, own_sent) in zip(wrapped, alone, strict=True):
        assert (losses, sent) == (own_losses, own_sent)
        assert same(model, own_model)


# ---- seams


def around_seam(comm: Comm, spec: str) -> dict[str, Any]:
    strategy = prepared(comm, spec)
    epochs(strategy, batches(2 * EPOCH, 24), EPOCH)
    ended = weights(strategy.consolidate())
    strategy.begin_epoch(EPOCH)
    found = {"ended": ended, "begun": weights(strategy.consolidate()), "status": strategy.status()}
    epochs(strategy, batches(2 * EPOCH, 24, seed=5), EPOCH)
    return found | {"end": weights(strategy.consolidate()), "learnt": strategy.num_steps}


@worlds(threads=[1, 2, 3], processes=[2])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_next_part_begins_with_what_the_last_consolidated_on_all_ranks(
    world: World, pair: tuple[str, str], ranks: int
) -> None:
    results = world(around_seam, ranks, spec_of(*pair, hand_over="whole"))
    for one in results:
        assert (one["status"]["part"], one["status"]["part_strategy"]) == (2, str(parse(pair[1])))
        assert one["learnt"] == 4 * EPOCH
        assert same(one["begun"], results[0]["begun"])
        assert same(one["end"], results[0]["end"])
        assert not same(one["end"], one["begun"])
        for name, before in one["ended"].items():
            rounds = "ist" in pair[1] or "running" in name  # ×n and ×1/n; the mean of equal statistics
            close = {"rtol": 1e-6, "atol": 1e-7} if rounds else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(one["begun"][name], before, **close)


def structure_after_ab(comm: Comm, spec: str) -> dict[str, Any]:
    strategy = prepared(comm, spec)
    epochs(strategy, batches(2 * EPOCH, 24), EPOCH)
    ended = strategy.consolidate().eval()
    strategy.begin_epoch(EPOCH)
    begun = strategy.strategy.consolidate().eval()
    x = batches(1, 32)[0][0]
    before, after = ended(x).detach(), begun(x).detach()
    epochs(strategy, batches(2 * EPOCH, 24, seed=5), EPOCH)
    (small,) = strategy.artifacts()
    whole = strategy.consolidate().eval()
    return {
        "names": [name for name, _ in strategy.model.named_parameters()], "before": before, "after": after,
        "small": small.model.eval()(x).detach(), "whole": whole(x).detach(), "whole_names": list(whole.state_dict()),
        "sizes": [sum(p.numel() for p in model.parameters()) for model in (small.model, whole)],
        "flags": [small.name, small.computes_the_same], "grads": all(p.requires_grad for p in begun.parameters()),
    }  # fmt: skip


@worlds(threads=[1, 2, 4], processes=[2])
@pytest.mark.parametrize(
    "follower", ["data_parallel", "local_sgd(every=2)", "daso(warmup_epochs=0, cooldown_epochs=0)"]
)
def test_after_ab_both_factors_are_trained_and_the_whole_model_is_full_again(
    world: World, follower: str, ranks: int
) -> None:
    for one in world(structure_after_ab, ranks, spec_of(AB, follower)):
        assert {"3.down.weight", "3.up.weight"} <= set(one["names"])
        assert one["grads"]
        torch.testing.assert_close(one["after"], one["before"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one["small"], one["whole"], rtol=1e-4, atol=1e-5)
        assert one["whole_names"] == list(MODELS[0].state_dict())
        small, whole = one["sizes"]
        assert small < whole == sum(p.numel() for p in MODELS[0].parameters())
        assert one["flags"] == ["factored", True]


def with_frozen_parts(comm: Comm, spec: str) -> tuple[bool, bool, bool]:
    model = copy.deepcopy(MODELS[0])
    model[0].weight.requires_grad_(False)
    model[1].eval()
    strategy = prepared(comm, spec, model)
    epochs(strategy, batches(3 * EPOCH, 24), EPOCH)
    whole = strategy.consolidate()
    return torch.equal(whole[0].weight, model[0].weight), whole[0].weight.requires_grad, whole[1].training


@pytest.mark.parametrize("pair", [("data_parallel", "local_sgd(every=2)"), ("local_sgd(every=2)", AB), (AB, "diloco")])
def test_what_is_frozen_stays_frozen_after_a_seam(pair: tuple[str, str]) -> None:
    assert on_threads(with_frozen_parts, 2, spec_of(*pair)) == [(True, False, False)] * 2


# ---- optimizer and learning rates


def after_seam_in_sync(comm: Comm, spec: str, optimizer: Any) -> list[dict[str, Tensor]]:
    """The weights after each step of both parts."""
    strategy = prepared(comm, spec, optimizer=optimizer, schedule=factors)
    found = []
    for i, batch in enumerate(batches(4 * EPOCH, 24)):
        epochs(strategy, [batch], EPOCH, start=i)
        found.append(weights(strategy.consolidate()))
    return found


@worlds(threads=[1, 3], processes=[2])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_parts_of_one_strategy_are_that_strategy_without_a_seam(world: World, optimizer: Any, ranks: int) -> None:
    """Momenta, counters and the schedule are carried over, so two halves of data_parallel are data_parallel."""
    halves = world(after_seam_in_sync, ranks, spec_of("data_parallel", "data_parallel(bucket_mb=25)"), optimizer)
    whole = world(after_seam_in_sync, ranks, "data_parallel", optimizer)
    for one, other in zip(halves, whole, strict=True):
        for after, without in zip(one, other, strict=True):
            for name, value in without.items():
                close = (
                    {"rtol": 1e-6, "atol": 1e-7} if "running" in name else {"rtol": 0, "atol": 0}
                )  # averaged earlier
                torch.testing.assert_close(after[name], value, **close)


def momenta(comm: Comm, pair: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """The momenta of each rank before a seam, and after it."""
    strategy = prepared(comm, spec_of(*pair))
    epochs(strategy, batches(2 * EPOCH, 24), EPOCH)

    def now() -> list[Tensor]:
        return [one["momentum_buffer"].clone() for one in strategy.strategy.learner.optimizer.state.values()]

    before = now()
    strategy.begin_epoch(EPOCH)
    return before, now()


@pytest.mark.parametrize("first", ["local_sgd(every=2)", "daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=0)"])
def test_ranks_with_momenta_of_their_own_go_on_with_the_mean(world: World, first: str) -> None:
    ranks = world(momenta, 3, [first, "data_parallel"])
    for i, after in enumerate(ranks[0][1]):
        torch.testing.assert_close(after, torch.stack([before[i] for before, _ in ranks]).mean(0))
    for _, after in ranks:
        assert all(torch.equal(a, b) for a, b in zip(after, ranks[0][1], strict=True))
    assert not torch.equal(ranks[0][0][0], ranks[1][0][0])


def test_a_new_optimizer_climbs_and_a_carried_one_does_not() -> None:
    def seams(comm: Comm) -> list[Any]:
        found = []
        for pair in (("data_parallel", "local_sgd"), ("ist", "local_sgd"), ("local_sgd", "ist"), (AB, "data_parallel")):
            strategy = prepared(comm, spec_of(*pair, climb=1))
            epochs(strategy, batches(2 * EPOCH, 24), EPOCH)
            strategy.begin_epoch(EPOCH)
            found.append((strategy.seam.steps_before, strategy.seam.climb))
        return found

    assert on_threads(seams, 2)[0] == [(6, 0), (6, 3), (6, 3), (6, 3)]


def made_recipe(schedule: Any, seam: Seam, epochs: int | None = 4, total: int | None = 10) -> Callable[[int], float]:
    """The learning-rate factors of the second part of a run whose factor is its step."""
    recipe = Recipe(nn.functional.cross_entropy, sgd, lambda step: float(step), epochs=total)
    parts = plan_parts([parse("alone"), parse("alone")], [6, 4] if total else [6], total)
    made = recipe_of(parts[1], seam, recipe, schedule, is_last=True)
    assert made.epochs == epochs
    return made.schedule


def test_learning_rates_of_a_part() -> None:
    of_run, of_part = made_recipe("run", Seam(60)), made_recipe("part", Seam(60))
    assert [of_run(step) for step in (0, 1, 39)] == [60, 61, 99]
    assert [of_part(step) for step in (0, 1, 39)] == [1, 3, 98]  # 100 steps' factors in 40 steps
    climbing = made_recipe("run", Seam(60, climb=3))
    assert [climbing(step) for step in (0, 1, 2, 3, 4)] == [60 / 4, 61 / 2, 62 * 3 / 4, 63, 64]
    assert [made_recipe("part", Seam(60), None, None)(step) for step in (0, 7)] == [0, 7]  # its beginning
    open_run = Recipe(nn.functional.cross_entropy, sgd, lambda step: float(step))
    first = plan_parts([parse("alone"), parse("alone")], [6], None)[0]
    assert [recipe_of(first, Seam(), open_run, "part", False).schedule(step) for step in (0, 7)] == [0, 7]


def rates(comm: Comm, spec: str, total: int) -> list[float]:
    seen: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(self.param_groups[0]["lr"])
            super().step(closure)

    strategy = trainer(
        comm, spec, optimizer=lambda p: Noting(p, 1.0), epochs=total, schedule=lambda step: 1 - step / (total * EPOCH)
    )
    epochs(strategy, batches(total * EPOCH, 24), EPOCH)
    return seen


def test_one_schedule_for_the_run_or_anew_in_each_part() -> None:
    parts = ("data_parallel", "local_sgd")
    (of_run,) = on_threads(rates, 1, spec_of(*parts), 4)
    assert of_run == [1 - step / 12 for step in range(12)]
    (of_parts,) = on_threads(rates, 1, spec_of(*parts, schedule="part"), 4)
    assert of_parts == [1 - step / 12 for step in (1, 3, 5, 7, 9, 11)] * 2
    (restarted,) = on_threads(rates, 1, spec_of(*parts, schedule="restart"), 4)
    assert restarted == [1 - step / 12 for step in (0, 1, 2, 3, 4, 5, 1, 3, 5, 7, 9, 11)]


class Branches(nn.Module):
    """Uses a layer only for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.branch(h) if x[0, 0] > 0 else h)


BRANCHES = seeded(4, Branches)


def with_unused_parameters(comm: Comm) -> list[Any]:
    """Rank 0 uses the branch in all batches, rank 1 only in the first."""
    spec = spec_of("local_sgd(every=2)", "data_parallel(unused_parameters=True)")
    strategy = prepared(comm, spec, BRANCHES, optimizer=adamw)
    for i, (x, y) in enumerate(batches(4 * EPOCH, 8)):
        x[0, 0] = 1.0 if comm.rank == 0 or i == 0 else -1.0
        strategy.step((x, y))
        if (i + 1) % EPOCH == 0:
            strategy.end_epoch()
    steps_of = [int(state["step"]) for state in strategy.strategy.learner.optimizer.state.values()]
    return [steps_of, weights(strategy.model)]


def test_counters_of_a_parameter_that_some_rank_did_not_use_are_equal_after_a_seam(world: World) -> None:
    (steps_of, model), (other_steps, other_model) = world(with_unused_parameters, 2)
    assert steps_of == other_steps
    assert same(model, other_model)


def test_the_end_of_an_epoch_without_steps_does_not_count() -> None:
    def parts(comm: Comm) -> list[int]:
        strategy = prepared(comm, spec_of("data_parallel", "local_sgd", lengths="[2]"))
        found = []
        for batch in batches(4, 24):
            steps(strategy, [batch])
            found.append(strategy.part.number)
            strategy.end_epoch()
            strategy.end_epoch()
        return found

    assert on_threads(parts, 2) == [[1, 1, 2, 2]] * 2


def test_a_loop_that_never_ends_an_epoch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def train(comm: Comm) -> None:
        strategy = prepared(comm, spec_of("data_parallel", "diloco", lengths="[1]"))
        steps(strategy, batches(7, 24))
        strategy.consolidate()

    logger = logging.getLogger("thinwire")
    logger.addHandler(caplog.handler)
    try:
        on_threads(train, 2)
    finally:
        logger.removeHandler(caplog.handler)
    assert "sequence has done 7 steps and is still in its first epoch; call trainer.end_epoch()" in caplog.text


# ---- bytes


Sent = dict[tuple[int, str], int]  # by part and purpose


def sent_by_part(comm: Comm) -> Sent:
    sent: Sent = {}
    for row in comm.ledger.rows():
        key = row["part"], row["purpose"]
        sent[key] = sent.get(key, 0) + row["wire_bytes"]
    return sent


def bytes_with_and_without_second_part(comm: Comm, spec: str) -> tuple[Sent, Sent, Sent]:
    """What was sent at the end of the first part, after the seam, and at the end."""
    strategy = prepared(comm, spec)
    data = batches(4 * EPOCH, 24)
    epochs(strategy, data[: 2 * EPOCH], EPOCH)
    first = sent_by_part(comm)
    strategy.begin_epoch(EPOCH)
    seam = sent_by_part(comm)
    epochs(strategy, data[2 * EPOCH :], EPOCH, start=2 * EPOCH)
    return first, seam, sent_by_part(comm)


def bytes_of_half(comm: Comm, spec: str) -> dict[str, int]:
    strategy = trainer(comm, spec, epochs=2)
    strategy.begin_epoch(EPOCH)
    epochs(strategy, batches(2 * EPOCH, 24), EPOCH)
    sent: dict[str, int] = {}
    for row in comm.ledger.rows():
        sent[row["purpose"]] = sent.get(row["purpose"], 0) + row["wire_bytes"]
    return sent


@pytest.mark.parametrize("pair", [*PAIRS[:4], ("data_parallel", AB), PAIRS[6]])
def test_bytes_are_the_sum_of_those_of_the_parts(pair: tuple[str, str]) -> None:
    """Each part sends what it would send alone, for training and for syncs; the seam is apart."""
    results = on_threads(bytes_with_and_without_second_part, 3, spec_of(*pair))
    halves = [on_threads(bytes_of_half, 3, one) for one in pair]
    for rank, (first, seam, end) in enumerate(results):
        assert first == {(1, purpose): count for purpose, count in halves[0][rank].items()}
        assert {key: end[key] for key in first} == first, "the first part sends nothing after the seam"
        assert {purpose for (number, purpose), _ in seam.items() if number == 2} <= {"sync", "start"}
        for purpose in ("train", "sync"):
            key = (2, purpose)
            assert end.get(key, 0) - seam.get(key, 0) == halves[1][rank].get(purpose, 0), purpose


def test_a_trainer_that_is_prepared_later_has_no_part() -> None:
    def parts(comm: Comm) -> set[int]:
        epochs(prepared(comm, spec_of("data_parallel", "local_sgd")), batches(3 * EPOCH, 24), EPOCH)
        before = {key[0] for key in sent_by_part(comm)}
        comm.ledger.totals.clear()
        epochs(trainer(comm, "data_parallel"), batches(2, 24), EPOCH)
        return before | {10 + key[0] for key in sent_by_part(comm)}

    assert on_threads(parts, 2) == [{1, 2, 10}] * 2


def bytes_of_seam(comm: Comm, pair: list[str]) -> dict[str, int]:
    strategy = prepared(comm, spec_of(*pair))
    epochs(strategy, batches(2 * EPOCH, 24), EPOCH)
    before = {row["purpose"]: 0 for row in comm.ledger.rows()}
    for row in comm.ledger.rows():
        before[row["purpose"]] += row["wire_bytes"]
    strategy.begin_epoch(EPOCH)
    after = dict.fromkeys(before, 0)
    for row in comm.ledger.rows():
        after[row["purpose"]] = after.get(row["purpose"], 0) + row["wire_bytes"]
    return {purpose: count - before.get(purpose, 0) for purpose, count in after.items() if count != before.get(purpose)}


def test_a_seam_sends_the_model_once_and_momenta_of_ranks_once() -> None:
    """Two ranks: a broadcast of P and an all-reduce of 2(n−1)/n·P = P; BatchNorm's statistics; flags."""
    tensors = MODELS[0].state_dict()
    parameters = 4 * sum(p.numel() for p in MODELS[0].parameters())
    buffers = sum(t.numel() * t.element_size() for name, t in tensors.items() if "running" in name)
    counter = tensors["1.num_batches_tracked"].element_size()
    flags = len(list(MODELS[0].parameters()))
    first, second = on_threads(bytes_of_seam, 2, ["data_parallel", "local_sgd"])
    averaged = buffers  # 2(n−1)/n = 1 on two ranks
    assert first == {"sync": averaged + counter + parameters + buffers + counter + 1}
    assert second == {"sync": averaged + 1}
    with_momenta, _ = on_threads(bytes_of_seam, 2, ["local_sgd", "data_parallel"])
    assert with_momenta == {"sync": first["sync"] + parameters + flags}


# ---- resume


def stop_at_each_step(comm: Comm, spec: str, stops: list[int]) -> list[dict[str, Tensor]]:
    data = batches(4 * EPOCH, 24)
    straight = prepared(comm, spec, schedule=factors)
    saved = {}
    for i, batch in enumerate(data):
        if i in stops:
            saved[i] = copy.deepcopy(straight.state_dict())
        epochs(straight, [batch], EPOCH, start=i)
    found = [weights(straight.consolidate())]
    for stop, state in saved.items():
        after = prepared(comm, spec, MODELS[3], schedule=factors)
        after.load_state_dict(state)
        assert after.state_dict()["counts"] == state["counts"]
        epochs(after, data[stop:], EPOCH, start=stop)
        found.append(weights(after.consolidate()))
    return found


@worlds(threads=[1, 3], processes=[2])
@pytest.mark.parametrize("hand_over", ["small", "whole"])
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[4], PAIRS[6], ("data_parallel", AB)])
def test_resume_is_exact_in_each_part_and_at_the_seam(
    world: World, pair: tuple[str, str], hand_over: str, ranks: int
) -> None:
    stops = [2, 2 * EPOCH, 2 * EPOCH + 1, 3 * EPOCH] if ranks != 3 else [*range(0, 4 * EPOCH, 2)]
    for straight, *resumed in world(stop_at_each_step, ranks, spec_of(*pair, hand_over=hand_over), stops):
        for stop, one in zip(stops, resumed, strict=True):
            assert same(straight, one), f"after {stop} steps"


def stop_in_a_loop(comm: Comm, spec: str) -> list[dict[str, Tensor]]:
    """Loops over tw.epoch that go on after each batch that was saved."""
    data = torch.utils.data.TensorDataset(*batches(1, 50)[0])
    saved: list[Any] = []

    def train(state: Any = None) -> dict[str, Tensor]:
        strategy = prepared(comm, spec, MODELS[0 if state is None else 3], schedule=factors)
        loader = tw.loader(data, strategy.shard, batch_size=8)
        if state is not None:
            strategy.load_state_dict(state[0])
            loader.load_state_dict(state[1])
        for _ in range(loader.epoch, 4):
            for batch in tw.epoch(strategy, loader, comm):
                if state is None:
                    saved.append((copy.deepcopy(strategy.state_dict()), loader.state_dict()))
                    saved[-1][1]["batch"] -= 1  # this batch is not trained yet
                strategy.step(batch)
        return weights(strategy.consolidate())

    straight = train()
    return [straight, *(train(state) for state in saved[1::3])]


SHARDS = [
    ("data_parallel", "local_parallel(blocks=2)"),
    ("local_parallel(blocks=2)", "data_parallel"),
    ("local_sgd(every=2)", "ist(local_steps=2)"),
    ("alone", "local_sgd(every=2)"),
]


@worlds(threads=[2], processes=[2])
@pytest.mark.parametrize("pair", SHARDS)
def test_resume_is_exact_in_a_loop_whose_parts_read_other_shards(
    world: World, pair: tuple[str, str], ranks: int
) -> None:
    for straight, *resumed in world(stop_in_a_loop, ranks, spec_of(*pair)):
        assert len(resumed) >= 3
        assert all(same(straight, one) for one in resumed)


def three_parts(comm: Comm, stops: list[int]) -> list[dict[str, Tensor]]:
    spec = f"sequence([{AB}, data_parallel, local_sgd(every=2)], [2, 1, 1])"
    return stop_at_each_step(comm, spec, stops)


def test_a_low_rank_model_goes_through_two_seams_and_resumes_after_each() -> None:
    stops = [6, 7, 9, 10]
    for straight, *resumed in on_threads(three_parts, 2, stops):
        assert all(same(straight, one) for one in resumed)


def back_to_an_earlier_state(comm: Comm) -> bool:
    """A trainer in its last part loads a state of its first."""
    data, spec = batches(4 * EPOCH, 24), spec_of(AB, "data_parallel")
    one = prepared(comm, spec)
    epochs(one, data[:2], EPOCH)
    state = copy.deepcopy(one.state_dict())
    epochs(one, data[2:], EPOCH, start=2)
    end = weights(one.consolidate())
    one.load_state_dict(state)
    epochs(one, data[2:], EPOCH, start=2)
    return same(end, weights(one.consolidate()))


def test_a_trainer_can_go_back_to_a_state_of_an_earlier_part() -> None:
    assert all(on_threads(back_to_an_earlier_state, 2))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (spec_of("data_parallel", "diloco"), {}, "of a sequence of data_parallel, local_sgd; use the same parts"),
        (spec_of("data_parallel", "local_sgd", climb=1), {}, r"of \(schedule, hand_over, climb, epochs\) .*0.5"),
        (spec_of("data_parallel", "local_sgd", lengths="[3, 1]"), {}, r"\[2.0, 2.0\]\], not"),
        (spec_of("data_parallel", "local_sgd"), {"optimizer": adamw}, "learning rate is 0.1 now, but it was made with"),
    ],
)
def test_a_state_of_another_sequence_is_refused(spec: str, options: dict[str, Any], message: str) -> None:
    def load(comm: Comm) -> None:
        state = prepared(comm, spec_of("data_parallel", "local_sgd")).state_dict()
        prepared(comm, spec, **options).load_state_dict(state)

    with pytest.raises((RunError, UsageError), match=message):
        on_threads(load, 1)


def test_fewer_epochs_than_the_last_part_needs_are_refused() -> None:
    def load(comm: Comm) -> None:
        state = trainer(comm, "sequence([data_parallel, local_sgd])", epochs=10).state_dict()
        trainer(comm, "sequence([data_parallel, local_sgd])", epochs=4).load_state_dict(state)

    with pytest.raises(UsageError, match="4 epochs, but in the saved run the last part begins after 5"):
        on_threads(load, 1)


# ---- a whole run


def run(comm: Comm, folder: str, spec: str, total: int, resume: bool = False) -> dict[str, Any]:
    config = RunConfig(
        task="digits", model="mlp(width=64)", strategy=spec, epochs=total, out=Path(folder), resume=resume,
        optimizer="adamw(weight_decay=0.1)", lr=0.003,
    )  # fmt: skip
    return Run(config, comm, torch.device("cpu")).run()


SPECS = [
    "sequence([ab(cutoff=0.5, unit=epochs, sync_every=1, warmup=1), data_parallel(reducer=maxnorm(bits=4))], [2, 1])",
    "sequence([local_parallel(blocks=2), data_parallel], [2, 1])",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_knows_its_parts_and_resumes_at_the_seam(process_world: ProcessWorlds, tmp_path: Path, spec: str) -> None:
    straight = process_world.run(run, 2, str(tmp_path / "straight"), spec, 3)[0]
    rows = read_rows(tmp_path / "straight" / "metrics.jsonl")
    assert [row["part"] for row in rows] == [1, 1, 2]
    assert rows[2]["part_strategy"].startswith("data_parallel")
    assert straight["value"] > 60
    parts = {row["part"] for row in read_rows(tmp_path / "straight" / "timeline.jsonl")}
    assert parts == {1, 2}
    final = [row for row in read_rows(tmp_path / "straight" / "ledger.jsonl") if row.get("final")]
    assert {row["part"] for row in final if row["purpose"] in ("train", "sync")} >= {1, 2}
    total = sum(sum(links.values()) for links in straight["wire_bytes_by_purpose"].values())
    assert sum(row["wire_bytes"] for row in final) == total

    folder = tmp_path / "stopped"
    process_world.run(run, 2, str(folder), spec, 3)
    cut_off_last_epoch(folder)
    resumed = process_world.run(run, 2, str(folder), spec, 3, True)[0]
    for name in ("value", "wire_bytes_by_purpose", "steps", "samples", "parameters_consolidated"):
        assert resumed[name] == straight[name], name
    models = [(path / "model.safetensors").read_bytes() for path in (tmp_path / "straight", folder)]
    assert models[0] == models[1]
    if spec.startswith("sequence([ab"):
        (small,) = straight["artifacts"]
        assert small["file"] == "model-factored.safetensors"
        assert small["ratio"] > 1
        assert small["value"] == pytest.approx(straight["value"], abs=0.5)


def cut_off_last_epoch(folder: Path) -> None:
    """Leave a run as it was after its last but one epoch."""
    newest = max((folder / "checkpoints").glob("step-*"))
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    for name in ("summary.json", "model.safetensors", "model-factored.safetensors"):
        (folder / name).unlink(missing_ok=True)
    assert json.loads(next((folder / "checkpoints").rglob("*.json")).read_text())["step"] > 0


def test_more_epochs_after_a_resume_are_those_of_the_last_part(process_world: ProcessWorlds, tmp_path: Path) -> None:
    spec = "sequence([data_parallel, local_sgd], [0.5, 0.5])"
    process_world.run(run, 2, str(tmp_path / "run"), spec, 2)
    process_world.run(run, 2, str(tmp_path / "run"), spec, 4, True)
    assert [row["part"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 2, 2]


def loop_of_ones_own(comm: Comm) -> tuple[list[int], list[int], bool]:
    """data_parallel on both ranks, then two blocks that read the same batches."""
    data = torch.utils.data.TensorDataset(*batches(1, 48)[0])
    strategy = trainer(comm, "sequence([data_parallel, local_parallel(blocks=2)])", epochs=2)
    loader = tw.loader(data, strategy.shard, batch_size=8)
    sizes, shards = [], []
    for _ in range(2):
        for batch in tw.epoch(strategy, loader, comm):
            strategy.step(batch)
            sizes.append(len(batch[0]))
        shards.append(strategy.shard.count)
    return sizes, shards, strategy.sees_loss


def test_a_loader_follows_a_part_that_reads_another_shard(world: World) -> None:
    first, second = world(loop_of_ones_own, 2)
    assert first[:2] == second[:2] == ([8, 8, 8, 16, 16, 16], [2, 1])
    assert (first[2], second[2]) == (False, True)


@pytest.mark.parametrize("loop", ["steps", "begin_epoch", "tw.epoch", "again"])
def test_batches_of_another_shard_are_refused_where_nothing_can_follow(loop: str) -> None:
    def train(comm: Comm) -> None:
        strategy = trainer(comm, "sequence([data_parallel, local_parallel(blocks=2)], [1])")
        epochs(strategy, batches(1, 24), 1)
        if loop == "begin_epoch":
            strategy.begin_epoch(1)
        if loop == "again":
            with pytest.raises(UsageError):
                strategy.step(batches(1)[0])
        for batch in tw.epoch(strategy, batches(1), comm) if loop == "tw.epoch" else batches(1):
            strategy.step(batch)

    with pytest.raises(UsageError, match=r"part 2, local_parallel\(blocks=2\), reads shard .* loop over tw.epoch"):
        on_threads(train, 2)


@pytest.mark.parametrize(("num_samples", "sizes"), [(26, [8, 8, 8, 2, 4, 4, 4]), (27, [8, 8, 8, 3, 4, 4, 4])])
def test_more_shards_after_a_seam_get_equally_many_samples(num_samples: int, sizes: list[int]) -> None:
    """One replica of two blocks reads batches of 8; then two ranks read 4 each, and none a tail of one sample."""

    def train(comm: Comm) -> list[int]:
        data = torch.utils.data.TensorDataset(*batches(1, num_samples)[0])
        strategy = trainer(comm, "sequence([local_parallel(blocks=2), data_parallel])", epochs=2)
        loader = tw.loader(data, strategy.shard, batch_size=8)
        found = []
        for _ in range(2):
            for batch in tw.epoch(strategy, loader, comm):
                strategy.step(batch)
                found.append(len(batch[0]))
        return found

    assert on_threads(train, 2) == [sizes] * 2


def test_batches_that_cannot_be_shared_by_the_next_part_are_refused() -> None:
    loader = tw.loader(torch.utils.data.TensorDataset(torch.ones(21, 1)), tw.Shard(0, 1), batch_size=7)
    with pytest.raises(UsageError, match=r"batches of 7 samples cannot be split into 2 equal shards.*multiple of 2"):
        loader.follow(tw.Shard(0, 2))


# ---- plans


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.integers(1, 60))
def test_parts_cover_the_run_without_gaps(weights: list[float], total: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    names = [parse("alone")] * len(shares)
    try:
        parts = plan_parts(names, shares, total)
    except UsageError:
        assert len(shares) > total or min(shares) * total < 1
        return
    assert parts[0].start == 0
    ends = [part.start + (part.epochs or 0) for part in parts]
    assert ends == [*(part.start for part in parts[1:]), total]
    assert all(abs((part.epochs or 0) - share * total) <= 1 for part, share in zip(parts, shares, strict=True))


@pytest.mark.parametrize(
    ("spec", "total", "message"),
    [
        (
            "sequence([data_parallel, local_sgd], [0.6, 0.5])",
            4,
            r"epochs=\[0.6, 0.5\] add up to 1.1; give shares .* to 4",
        ),
        ("sequence([data_parallel, local_sgd], [0.6, 0.3])", 4, "add up to 0.9"),
        ("sequence([data_parallel, local_sgd], [1.5])", 4, "add up to 1.5; .* less than 1, and the last part gets"),
        ("sequence([data_parallel, local_sgd], [3, 2])", 4, r"epochs=\[3, 2\] are 5 epochs, but the run has 4"),
        ("sequence([data_parallel, local_sgd], [4])", 4, "are 4 epochs, but the run has 4; give less than 4 in all"),
        ("sequence([data_parallel, local_sgd], [0.9, 0.1])", 4, "part 2, local_sgd, has less than one of 4 epochs"),
        ("sequence([data_parallel, local_sgd], [1, 1, 2])", 4, "for 2 parts; give a number for each part"),
        ("sequence([data_parallel, local_sgd, diloco])", 2, "3 parts in a run of 2 epochs"),
        ("sequence([data_parallel, local_sgd])", None, "equal share it must know how long the run is"),
        (
            "sequence([data_parallel, local_sgd], [0.5])",
            None,
            "are shares of the run, so it must know how long the run",
        ),
        ("sequence([data_parallel, local_sgd], [2, 2], climb=3)", 4, "climb=3 epochs, but part 2, local_sgd, has 2"),
        ("sequence([data_parallel], [1])", 4, "are 1 epochs, but the run has 4"),
        ("sequence([])", 4, r"parts=\[\]; give a list of strategies"),
        ("sequence", 4, r"parts is missing; give a list of strategies, as sequence\(\[data_parallel, local_sgd\]\)"),
        ("sequence(data_parallel)", 4, r"not a list of strategies; write it in brackets, as \[data_parallel\]"),
        ("sequence([data_parallel, local_sdg])", 4, "parts, part 2: unknown strategy 'local_sdg'; did you mean"),
        ("sequence([data_parallel, local_sgd(often=2)])", 4, "parts, part 2: unknown option of local_sgd 'often'"),
        ("sequence([data_parallel, 3])", 4, "3 is not a strategy; possible: data_parallel"),
        ("sequence([data_parallel, maxnorm])", 4, "maxnorm is a reducer, not a strategy"),
        ("sequence([data_parallel, sequence([local_sgd, ist])])", 4, "a part is a sequence itself; put its parts"),
        ("sequence([data_parallel, local_sgd], [-1, 5])", 4, r"epochs\[0\]=-1"),
        (f"sequence([{AB}, local_parallel])", 4, r"part 2, local_parallel, cannot follow part 1, ab.*hand_over=whole"),
        (f"sequence([{AB}, data_parallel, ist])", 4, "part 3, ist, cannot follow part 1, ab"),
        (f"sequence([{AB}, ab(cutoff=0.9)])", 4, "cannot follow"),
        (
            "sequence([data_parallel, daso(ranks_per_node=2, warmup_epochs=0, cooldown_epochs=0)])",
            4,
            r"part 2, daso.* 3 ranks",
        ),
        ("sequence([data_parallel, local_parallel(blocks=2)])", 4, "part 2, local_parallel.*: .*cannot share 2 blocks"),
        ("sequence([data_parallel, daso], [2, 2])", 4, "part 2, daso: daso: warmup_epochs=4 and cooldown_epochs=4"),
        ("sequence([data_parallel, pipeline])", 4, "part 2, pipeline: pipeline: torch's pipelines need processes"),
        ("sequence([data_parallel, ist(shares=[2, 1])])", 4, "part 2, ist.*for 3 ranks"),
    ],
)
def test_a_sequence_that_cannot_be_is_refused_by_prepare(spec: str, total: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        on_threads(lambda comm: trainer(comm, spec, epochs=total), 3)


def test_phases_that_do_not_fit_their_part_are_refused_before_the_first_step() -> None:
    def begin(comm: Comm) -> None:
        strategy = trainer(comm, "sequence([data_parallel, ab(sync_every=4, warmup=50)], [2, 2])", epochs=4)
        strategy.begin_epoch(EPOCH)

    with pytest.raises(UsageError, match=r"part 2, ab.*: ab: the warm-up of 50 steps is not shorter than the run of 6"):
        on_threads(begin, 2)


def test_what_a_new_optimizer_would_lose_is_refused() -> None:
    def with_scheduler(parameters: Any) -> torch.optim.Optimizer:
        made = sgd(parameters)
        torch.optim.lr_scheduler.StepLR(made, 1)
        return made

    with pytest.raises(UsageError, match="makes a learning-rate scheduler, but this strategy makes a new optimizer"):
        on_threads(lambda comm: prepared(comm, spec_of("data_parallel", "local_sgd"), optimizer=with_scheduler), 1)

    def changed(comm: Comm) -> None:
        strategy = prepared(comm, spec_of("data_parallel", "local_sgd"))
        epochs(strategy, batches(2 * EPOCH, 24), EPOCH)
        strategy.strategy.learner.optimizer.param_groups[0]["lr"] = 0.5
        strategy.begin_epoch(EPOCH)

    with pytest.raises(UsageError, match=r"learning rate is 0.5 now, but it was made with 0.1"):
        on_threads(changed, 1)


def test_one_part_may_have_a_scheduler_as_its_strategy_may() -> None:
    made: list[Any] = []

    def with_scheduler(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return optimizer

    on_threads(lambda comm: trainer(comm, "sequence([data_parallel])", optimizer=with_scheduler, epochs=None), 1)
    assert len(made) == 1


def test_an_error_in_a_part_names_it() -> None:
    def diverge(comm: Comm) -> None:
        strategy = prepared(comm, spec_of("data_parallel", "local_sgd"), schedule=lambda step: 1e30 if step > 6 else 1)
        epochs(strategy, batches(4 * EPOCH, 24), EPOCH)

    with pytest.raises(RunError, match=r"sequence: part 2, local_sgd: the (loss|gradient)"):
        on_threads(diverge, 2)


def test_groups_of_a_part_are_closed_with_it(process_world: ProcessWorlds) -> None:
    assert process_world.run(count_groups, 2) == [[1, 0, 2]] * 2


def count_groups(comm: Comm) -> list[int]:
    mine = [comm.split([range(comm.size)], "mine")]
    strategy = prepared(comm, spec_of("local_sgd", "data_parallel"))
    mine.append(comm.split([range(comm.size)], "mine too"))
    found = [len(comm.subgroups) - 2]
    epochs(strategy, batches(2 * EPOCH + 1, 24), EPOCH)
    found.append(len(comm.subgroups) - 2)
    return [*found, sum(int(group.mean(torch.ones(1))) for group in mine)]


# ---- parts of it


def test_a_dry_comm_sends_nothing_and_counts_what_would_be_sent() -> None:
    def count(comm: Comm) -> tuple[int, int, int]:
        dry = DryComm(comm)
        halves = dry.split([[0, 1], [2, 3]], "half")
        halves.mean(torch.ones(100))
        assert [t.shape for t in dry.all_gather(torch.ones(3, 2))] == [(3, 2)] * 4
        assert dry.recv(torch.ones(5), (comm.rank + 1) % 4).shape == (5,)
        return halves.size, dry.ledger.wire_bytes, comm.ledger.wire_bytes

    assert on_threads(count, 4) == [(2, 400 + 72, 0)] * 4  # 2(n−1)/n·400 in each half; the gather is 3·24


class Attention(nn.Module):
    """A model with torch's packed attention and a layer whose weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[:, None]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(nn.functional.linear(x, self.middle.weight, self.middle.bias))[:, 0]


ATTENTION = seeded(3, Attention)


def through_attention(comm: Comm) -> tuple[bool, list[str], bool]:
    spec = spec_of("ab(sync_every=3, warmup=1, cutoff=0.8)", "data_parallel")
    data = batches(4 * EPOCH, 24)
    straight = prepared(comm, spec, ATTENTION)
    epochs(straight, data[:8], EPOCH)
    state = copy.deepcopy(straight.state_dict())
    epochs(straight, data[8:], EPOCH, start=8)
    after = prepared(comm, spec, ATTENTION)
    after.load_state_dict(state)
    epochs(after, data[8:], EPOCH, start=8)
    whole, (small,) = straight.consolidate().eval(), straight.artifacts()
    x = data[0][0]
    is_equal = torch.allclose(whole(x), small.model.eval()(x), rtol=1e-4, atol=1e-5)
    return same(weights(whole), weights(after.consolidate())), list(whole.state_dict()), is_equal


def test_attention_and_weights_that_are_read_go_through_a_seam(world: World) -> None:
    for is_same, names, is_equal in world(through_attention, 2):
        assert is_same
        assert is_equal
        assert sorted(names) == sorted(ATTENTION.state_dict())


def test_low_rank_layers_are_found_given_and_merged() -> None:
    model = copy.deepcopy(DEEP)
    names = ["1", "4", "7"]
    given = find_low_rank_layers(model, names)
    assert given.layer_ranks == {}
    thin = give_low_rank_layers(model, given._replace(layer_ranks={"4": 5}))
    assert find_low_rank_layers(thin, names).layer_ranks == {"4": 5}
    for factor in (thin[4].up, thin[4].down):
        nn.init.normal_(factor.weight)
    product = thin[4].up.weight @ thin[4].down.weight
    bias = thin[4].up.bias
    full = merge_low_rank_layers(thin, given._replace(layer_ranks={"4": 5}))
    torch.testing.assert_close(full[4].weight, product)
    assert full[4].bias is bias


def through_three_parts(comm: Comm, name: str) -> bool:
    """A strategy as the second part, and another one before and behind it, in a loop that follows their shards."""
    options = {"daso": "(warmup_epochs=0, cooldown_epochs=0)", "ab": "(sync_every=3, warmup=1, cutoff=0.7)"}
    spec = f"sequence([local_sgd(every=2), {name}{options.get(name, '')}, data_parallel], [1, 2, 1])"
    strategy = prepared(comm, spec)
    loader = tw.loader(torch.utils.data.TensorDataset(*batches(1, 48)[0]), strategy.shard, batch_size=8)
    for _ in range(4):
        for batch in tw.epoch(strategy, loader, comm):
            strategy.step(batch)
    models = comm.all_gather(torch.cat([p.detach().flatten() for p in strategy.consolidate().parameters()]))
    return all(torch.equal(model, models[0]) for model in models)


@pytest.mark.parametrize("name", [name for name in registry.TABLE["strategies"] if name != "sequence"])
def test_every_strategy_can_begin_and_end_in_mid_run(process_world: ProcessWorlds, name: str) -> None:
    assert process_world.run(through_three_parts, 2, name) == [True, True]


def memory_after_seams(comm: Comm, name: str) -> list[bool]:
    """Whether the first model is still in memory in the last part."""
    strategy = prepared(comm, f"sequence([{name}, data_parallel], [1])")
    loader = tw.loader(torch.utils.data.TensorDataset(*batches(1, 48)[0]), strategy.shard, batch_size=8)
    held = []
    for _ in range(2):
        for batch in tw.epoch(strategy, loader, comm):
            strategy.step(batch)
        held.append(weakref.ref(strategy.strategy))
    return [one() is not None for one in held]


@pytest.mark.parametrize(
    "name", ["data_parallel", "local_sgd", "diloco(fragments=2)", AB, "ist", "local_parallel", "pipeline"]
)
def test_a_part_that_ended_is_not_kept_in_memory(process_world: ProcessWorlds, name: str) -> None:
    assert process_world.run(memory_after_seams, 2, name) == [[False, True]] * 2


def test_tied_weights_stay_tied_where_a_later_part_is_tried_out() -> None:
    """ab cannot factor tied layers; of this model there are no others."""
    tied = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    tied[2].weight = tied[1].weight
    with pytest.raises(UsageError, match="sequence: part 2, ab: ab: no layer of this model can be factored"):
        on_threads(lambda comm: prepared(comm, spec_of("data_parallel", "ab"), tied), 2)


@pytest.mark.parametrize("pair", [("ist(local_steps=2)", "local_sgd"), ("ist(local_steps=2)", "data_parallel")])
def test_a_model_on_the_meta_device_can_begin_with_ist(pair: tuple[str, str]) -> None:
    def train(comm: Comm) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        strategy = prepared(comm, spec_of(*pair), model)
        epochs(strategy, batches(4 * EPOCH, 24), EPOCH)
        return weights(strategy.consolidate())

    first, second = on_threads(train, 2)
    assert same(first, second)
    assert all(tensor.isfinite().all() for tensor in first.values())
