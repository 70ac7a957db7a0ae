"""Local SGD and DiLoCo: what they compute, when they talk, what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.training import MODELS, PLAIN, batches, sgd, steps, trainer, weights
from tests.worlds import World
from thinwire.comm.base import Comm
from thinwire.common import messages
from thinwire.errors import PeerLost, RunError, UsageError

NUM_STEPS = 10


def train(comm: Comm, spec: str) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy
    strategy = tw.prepare(spec, model=copy.deepcopy(PLAIN), optimizer=sgd, loss=loss, comm=comm, epochs=2)
    steps(strategy, batches(NUM_STEPS, 24))
    strategy.end_epoch()
    return weights(strategy.consolidate())


def by_hand(ranks: int, every: int, outer_lr: float = 1.0, outer_momentum: float = 0.0) -> dict[str, Tensor]:
    """Ranks one after another, and between them what the paper says, with torch's own SGD as the outer optimizer."""
    outer = copy.deepcopy(PLAIN)
    outer_optimizer = torch.optim.SGD(outer.parameters(), outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    models = [copy.deepcopy(PLAIN) for _ in range(ranks)]
    optimizers = [sgd(model.parameters()) for model in models]
    for step, (x, y) in enumerate(batches(NUM_STEPS, 24), 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rank::ranks]), y[rank::ranks]).backward()
            optimizer.step()
        if step % every == 0 or step == NUM_STEPS:
            with torch.no_grad():
                for p, *locals_ in zip(outer.parameters(), *(m.parameters() for m in models), strict=True):
                    p.grad = p - torch.stack(list(locals_)).mean(0)
            outer_optimizer.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
    return outer.state_dict()


@pytest.mark.parametrize(
    ("spec", "every", "outer"),
    [
        ("local_sgd(every=1)", 1, ()),
        ("local_sgd(every=4)", 4, ()),
        ("diloco(every=1, outer_lr=1, outer_momentum=0)", 1, ()),
        ("diloco(every=5, outer_lr=1, outer_momentum=0)", 5, ()),
        ("diloco(every=3, outer_lr=0.7, outer_momentum=0.9)", 3, (0.7, 0.9)),
        ("diloco(every=4, outer_lr=0.5, outer_momentum=0.5)", 4, (0.5, 0.5)),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_computed_is_what_the_papers_say(
    world: World, ranks: int, spec: str, every: int, outer: tuple[float, ...]
) -> None:
    expected = by_hand(ranks, every, *outer)
    for result in world(train, ranks, spec):
        for name in expected:
            torch.testing.assert_close(result[name], expected[name], rtol=1e-4, atol=1e-5)


def test_averaging_after_every_step_is_data_parallel_for_plain_sgd(world: World) -> None:
    """The mean of n steps is the step along the mean gradient; with momentum too, which is linear."""
    for result, expected in zip(world(train, 2, "local_sgd(every=1)"), world(train, 2, "data_parallel"), strict=True):
        for name in expected:
            torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=1e-6)


def exchanged(comm: Comm, spec: str, num_steps: int) -> list[int]:
    """Payload bytes that training sent up to each step, and after the epoch's end."""
    strategy = trainer(comm, spec)
    found = []

    def sent() -> int:
        return sum(row["payload_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train")

    for batch in batches(num_steps, 24):
        steps(strategy, [batch])
        found.append(sent())
    strategy.end_epoch()
    return [*found, sent()]


MODEL_BYTES = 4 * sum(p.numel() for p in trainer(tw.simulate(lambda c: c, ranks=1)[0], "local_sgd").model.parameters())
STATISTICS_BYTES = 4 * 2 * 16


def test_ranks_talk_at_their_time_and_only_then() -> None:
    whole = MODEL_BYTES + STATISTICS_BYTES
    found = tw.simulate(lambda comm: exchanged(comm, "local_sgd(every=3)", 7), ranks=2)
    assert found == [[0, 0, whole, whole, whole, 2 * whole, 2 * whole, 3 * whole]] * 2
    met_at_the_end = tw.simulate(lambda comm: exchanged(comm, "local_sgd(every=3)", 6), ranks=2)
    assert met_at_the_end == [[0, 0, whole, whole, whole, 2 * whole, 2 * whole]] * 2


def test_fragments_take_turns_and_all_meet_at_the_end() -> None:
    (found, _) = tw.simulate(lambda comm: exchanged(comm, "diloco(every=4, fragments=2)", 8), ranks=2)
    first, second = found[1], found[3] - found[1]
    assert first + second == MODEL_BYTES + STATISTICS_BYTES
    assert 0 < first < 0.7 * MODEL_BYTES
    assert [b - a for a, b in zip([0, *found], found, strict=False)] == [
        0, first, 0, second, 0, first, 0, second, first,
    ]  # fmt: skip
    # the second had only just been exchanged, and an outer step without movement would be momentum alone


def two_epochs(comm: Comm, spec: str, length: int) -> list[int]:
    """In which of the steps, counted from 1, parameters were exchanged."""
    strategy: Any = trainer(comm, spec)
    found, begun = [], strategy.rounds.averaging.start
    strategy.rounds.averaging.start = lambda *args, **more: (
        found.append(strategy.learner.num_steps),
        begun(*args, **more),
    )[1]
    for _ in range(2):
        steps(strategy, batches(length, 24))
        strategy.end_epoch()
    return found


@pytest.mark.parametrize(
    ("spec", "length", "expected"),
    [
        ("local_sgd(every=3)", 5, [3, 5, 8, 10]),
        ("local_sgd(every=3)", 3, [3, 6]),
        ("diloco(every=4)", 4, [4, 8]),
        ("diloco(every=4, wait=2)", 4, [4, 8]),
        ("diloco(every=4, wait=2)", 5, [4, 5, 9, 10]),
        ("diloco(every=4, fragments=2)", 4, [2, 4, 4, 6, 8, 8]),
        ("diloco(every=4, fragments=2)", 5, [2, 4, 5, 5, 7, 9, 10, 10]),
    ],
)
def test_a_period_begins_with_each_epoch_and_nothing_is_exchanged_twice(
    spec: str, length: int, expected: list[int]
) -> None:
    assert tw.simulate(lambda comm: two_epochs(comm, spec, length), ranks=2) == [expected] * 2


def merges(comm: Comm, spec: str) -> list[int]:
    strategy: Any = trainer(comm, spec)
    found, done = [], strategy.rounds.averaging.merge
    strategy.rounds.averaging.merge = lambda: (found.append(strategy.learner.num_steps), done())[1]
    steps(strategy, batches(9, 24))
    return found


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("local_sgd(every=4)", [4, 8]),
        ("diloco(every=4)", [4, 8]),
        ("diloco(every=4, wait=3)", [7]),
        ("diloco(every=4, fragments=2)", [4, 6, 8]),
        ("diloco(every=4, fragments=2, wait=1)", [3, 5, 7, 9]),
        ("diloco(every=4, fragments=2, wait=0)", [2, 4, 6, 8]),
    ],
)
def test_what_was_sent_is_merged_after_its_wait(spec: str, expected: list[int]) -> None:
    assert tw.simulate(lambda comm: merges(comm, spec), ranks=2) == [expected] * 2


def loaded_from(comm: Comm, spec: str, other: str) -> None:
    saved = trainer(comm, spec).state_dict()
    strategy = trainer(comm, other, MODELS[1])
    before = weights(strategy.model)
    with pytest.raises(RunError, match=r"other options: every, wait or fragments|other outer options"):
        strategy.load_state_dict(saved)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(strategy.model).items())


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        ("diloco", "local_sgd(every=16)"),
        ("diloco(every=8)", "diloco(every=8, wait=1)"),
        ("diloco(every=8)", "diloco(every=8, fragments=2)"),
        ("local_sgd(every=8)", "local_sgd(every=9)"),
    ],
)
def test_a_state_of_other_options_is_refused_before_anything_is_changed(spec: str, other: str) -> None:
    tw.simulate(lambda comm: loaded_from(comm, spec, other), ranks=1)


def momenta(comm: Comm, spec: str) -> tuple[bool, bool]:
    """Is the inner optimizer's state the same before and after an exchange; is it the same on all ranks?"""
    strategy: Any = trainer(comm, spec)
    steps(strategy, batches(5, 24))

    def buffers() -> Tensor:
        optimizer = strategy.learner.optimizer
        return torch.cat([optimizer.state[p]["momentum_buffer"].flatten() for p in strategy.model.parameters()])

    before = buffers().clone()
    strategy.end_epoch()
    gathered = comm.all_gather(before)
    return torch.equal(before, buffers()), torch.equal(gathered[0], gathered[1])


@pytest.mark.parametrize("spec", ["local_sgd(every=2)", "diloco(every=2)", "daso(ranks_per_node=1, warmup_epochs=0)"])
def test_momentum_stays_each_ranks_own(world: World, spec: str) -> None:
    for untouched, equal in world(momenta, 2, spec):
        assert untouched
        assert not equal


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("local_sgd(every=0)", "every=0 is not possible: should be greater than 0"),
        ("diloco(outer_momentum=1)", "outer_momentum=1 is not possible: should be less than 1"),
        ("diloco(outer_lr=0)", "outer_lr=0 is not possible"),
        ("diloco(every=4, fragments=5)", "5 fragments in 4 steps; try fragments=4 or every=5"),
        ("diloco(every=4, fragments=2, wait=3)", "wait=3, but after 2 steps the next exchange begins"),
        ("diloco(every=40, fragments=20)", "fragments=20, but the model has 8 parameter tensors"),
        ("local_sgd(reducer=maxnorm(bits=3))", "bits=3 is not possible"),
        ("local_sgd(wait=1)", "unknown option of local_sgd 'wait'"),
    ],
)
def test_what_is_not_possible_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tw.simulate(lambda comm: trainer(comm, spec), ranks=1)
    assert message in str(caught.value)


@pytest.mark.parametrize(("outer", "told"), [(0.5, False), (0.9, True)])
def test_momenta_that_push_twice_are_told(outer: float, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tw.simulate(lambda comm: trainer(comm, f"diloco(outer_momentum={outer})"), ranks=2)
    said = capsys.readouterr().err
    assert said.count("add up, and the run may diverge; try outer_momentum=0.5") == told


# ---- unequal numbers of batches


class Stream(torch.utils.data.IterableDataset[Any]):
    """Its DataLoader looks as if it had a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from batches(self.length, 24)


def unequal(comm: Comm, spec: str, kind: str) -> tuple[list[int], dict[str, Tensor]]:
    """Rank r has 4 + r batches in each of three epochs; how many were trained on?"""
    strategy = trainer(comm, spec)
    counts = []
    for _ in range(3):
        data = batches(4 + comm.rank, 24)
        given: Any = {
            "list": data,
            "iterator": iter(data),
            "stream": torch.utils.data.DataLoader(Stream(4 + comm.rank), batch_size=None),
        }[kind]
        counts.append(sum(1 for batch in tw.epoch(strategy, given, comm) if steps(strategy, [batch])))
    return counts, weights(strategy.consolidate())


@pytest.mark.parametrize("kind", ["list", "iterator", "stream"])
@pytest.mark.parametrize("spec", ["data_parallel", "local_sgd(every=3)", "daso(ranks_per_node=1, warmup_epochs=0)"])
def test_an_epoch_ends_with_the_shortest_rank(world: World, spec: str, kind: str) -> None:
    results = world(unequal, 2, spec, kind)
    for counts, model in results:
        assert counts == [4, 4, 4]
        assert all(torch.equal(model[name], results[0][1][name]) for name in model)


def forgotten(comm: Comm) -> None:
    strategy = trainer(comm, "local_sgd(every=2)")
    steps(strategy, batches(4 + 2 * comm.rank, 24))
    strategy.end_epoch()


def test_without_agreement_a_rank_that_goes_on_alone_is_told_and_does_not_hang() -> None:
    with pytest.raises(PeerLost, match="it has finished"):
        tw.simulate(forgotten, ranks=2)


def test_an_epoch_of_one_rank_is_what_it_is_given() -> None:
    with tw.join() as comm:
        strategy = trainer(comm, "local_sgd")
        assert len(list(tw.epoch(strategy, iter(batches(3, 24)), comm))) == 3
        with pytest.raises(UsageError, match=r"the order is tw.epoch\(trainer, batches, comm\)"):
            next(iter(tw.epoch(batches(3, 24), strategy, comm)))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["local_sgd(every=5)", "diloco(every=5)"])
def test_periods_longer_than_an_epoch_are_told(
    spec: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_said", set())

    def train(comm: Comm, num_steps: int) -> None:
        ours = trainer(comm, spec)
        for _ in range(2):
            for batch in tw.epoch(ours, batches(num_steps, 24), comm):
                ours.step(batch)

    tw.simulate(lambda comm: train(comm, 5), ranks=2)
    assert capsys.readouterr().err == ""
    tw.simulate(lambda comm: train(comm, 3), ranks=2)
    said = "thinwire: every=5, but an epoch has 3 steps and ranks are averaged at its end: more than 3 saves nothing."
    assert capsys.readouterr().err.count(said) == 1


def test_ranks_with_fewer_batches_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def train(comm: Comm) -> None:
        strategy = trainer(comm, "local_sgd")
        for batch in tw.epoch(strategy, batches(7 + 2 * comm.rank, 24), comm):
            steps(strategy, [batch])

    tw.simulate(train, ranks=3)
    assert capsys.readouterr().err.count("ranks have 7 to 11 batches; all stop after 7") == 1
