"""Elastic runs on threads: ranks vanish and join at every point of a round."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.elastic.runs import PATIENCE, SAMPLES, Killed, Mortal, World, data, job, vanish, world
from tests.training import decayed_sgd, same, trainer, weights
from thinwire import registry
from thinwire.comm.store import local_store
from thinwire.elastic.hearts import Watch
from thinwire.elastic.meeting import LeftBehind, Meeting, Standing
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes, StoreLost, client
from thinwire.elastic.replay import replay
from thinwire.elastic.trainee import Trainee
from thinwire.errors import PeerLost, RunError, UsageError

POINTS = ["gather", "hand over", "train", "exchange", "settle", "decided", "merge"]
NESTED = {
    "error_feedback": "error_feedback(maxnorm(bits=4))",
    "warmup": "warmup(powersgd(rank=1), steps=1)",
    "partition": "partition(matrices=maxnorm(bits=4))",
}
ALL_REDUCERS = [NESTED.get(name, name) for name in registry.TABLE["reducers"]]
STORE = """
import datetime, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=30), wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


def check(run: World) -> Mortal:
    """All that ended have recorded the same, ended with the same weights, and a replay gives them again."""
    first, *others = run.alive()
    for other in others:
        assert other.record.rows == first.record.rows
        assert same(weights(other.trainee.model), weights(first.trainee.model))
        assert torch.equal(other.trainee.averager.momentum, first.trainee.averager.momentum)
    rows = first.record.rows
    assert [row.round for row in rows] == list(range(len(rows)))
    for row in rows:
        assert sum(row.weights.values()) == pytest.approx(1)
    again = replay(rows, run.job, run.again)
    assert same(again, weights(first.trainee.model))
    return first


@pytest.mark.parametrize("strategy", ["local_sgd(every=2)", "diloco(every=3)", "diloco(every=2, reducer=powersgd)"])
def test_a_run_without_changes_is_that_of_the_strategy(strategy: str) -> None:
    def ordinary(comm: Any) -> Any:
        one = trainer(comm, strategy, optimizer=decayed_sgd, schedule=lambda step: 0.9**step)
        loader = tw.loader(data(), one.shard, 8, seed=0)
        for _ in range(2):
            for batch in loader:
                one.step(batch)
            one.end_epoch()
        return weights(one.learner.model)

    steps = SAMPLES // 16
    with world(job(strategy, schedule=lambda done, total: 0.9 ** round(done * steps - 0.5))) as run:
        run.start(2, min_ranks=2)
    assert not run.errors
    assert same(weights(check(run).trainee.model), tw.simulate(ordinary, ranks=2)[0])


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_vanishes_costs_its_own_samples_of_the_round(point: str) -> None:
    def end(at: str, member: Mortal) -> None:
        if (at == point and member.at.round == 1) or (at == point == "gather" and member.at.round == 0):
            vanish(member)

    with world(job("diloco(every=1)")) as run:
        run.start(2, min_ranks=3)
        run.start(1, min_ranks=3, before=end)
    (lost,) = run.errors
    assert isinstance(run.errors[lost], Killed)
    rows = check(run).record.rows
    assert sum(row.lost_samples for row in rows) <= 8 * (2 if point in ("decided", "merge") else 1)
    assert lost not in rows[-1].members
    assert rows[-1].epoch == 1


@pytest.mark.parametrize("reducer", ALL_REDUCERS)
def test_a_newcomer_has_the_state_of_the_members_before_it_counts(reducer: str) -> None:
    """Its first round gives it what the others have: parameters, buffers, outer momentum, and states of the reducer."""

    def later(at: str, member: Mortal) -> None:
        if at == "train" and member.at.round == 1:
            if member.id == 0:
                run.start(1)
            while len(run.notes.entries("lobby")) < 3:
                time.sleep(0.01)

    with world(job(f"diloco(every=1, reducer={reducer})", epochs=3)) as run:
        run.start(2, min_ranks=2, before=later)
    assert not run.errors
    first = check(run)
    (row,) = [row for row in first.record.rows if row.joined]
    assert row.round == 2
    assert row.began == [0, 1, 2]
    states = [
        {key: value for state in member.trainee.averager.states for key, value in state.items()}
        for member in run.members
    ]
    for key in [key for key in states[0] if "residual/" not in key]:
        assert all(torch.equal(state[key], states[0][key]) for state in states), key
    if "powersgd" in reducer or "feedback" in reducer:
        assert any("residual/" in key and value.any() for key, value in states[2].items())
    assert any(row["purpose"] == "start" and row["wire_bytes"] for row in first.ledger.rows())


@pytest.mark.parametrize("point", ["train", "exchange"])
def test_a_newcomer_begins_anew_if_the_member_that_gave_it_the_state_is_lost(point: str) -> None:
    """It has trained on the moments of that member: then the record would not say what it began with."""

    def leave(at: str, member: Mortal) -> None:
        if at == "train" and member.at.round == 1:
            run.start(1)
            while len(run.notes.entries("lobby")) < 3:
                time.sleep(0.01)
        if at == point and member.at.round == 2:
            while run.members[2].trained < 2:  # the newcomer has trained, too
                time.sleep(0.01)
            vanish(member)

    with world(job("local_sgd(every=1)", epochs=2)) as run:
        run.start(1, min_ranks=2, before=leave)
        run.start(1, min_ranks=2)
    (lost,) = run.errors
    rows = check(run).record.rows
    assert rows[2].joined == [2]
    assert list(rows[2].lost) == [str(lost)]
    steps = {member.id: member.trainee.learner.optimizer.state for member in run.alive()}
    assert all(steps.values())


@pytest.mark.parametrize("strategy", ["local_sgd(every=2)", "diloco(every=2, reducer=powersgd(rank=1))"])
def test_a_void_round_leaves_no_trace(strategy: str) -> None:
    """A connection breaks, and nobody is lost: the second attempt gives what an undisturbed run does."""

    def break_once(at: str, member: Mortal) -> None:
        if at == "exchange" and member.at.round == 1 and member.group == 0:
            member.trainee.result = lost  # type: ignore[method-assign]
        elif at == "gather":
            member.trainee.__dict__.pop("result", None)

    def lost() -> None:
        raise PeerLost("the connection broke when the result was here")

    found = []
    for before in (break_once, None):
        with world(job(strategy)) as run:
            run.start(1, min_ranks=2, before=before)
            while not run.notes.entries("lobby"):  # members are in the order in which they came
                time.sleep(0.01)
            run.start(1, min_ranks=2)
        assert not run.errors
        found.append(check(run))
    disturbed, undisturbed = found
    assert disturbed.group > 0
    assert disturbed.record.rows == undisturbed.record.rows
    assert same(weights(disturbed.trainee.model), weights(undisturbed.trainee.model))


def test_a_rank_that_stops_and_wakes_up_after_it_was_replaced_merges_nothing() -> None:
    def sleep(at: str, member: Mortal) -> None:
        if at == "exchange" and member.at.round == 1:
            member.membership.heart.stop()
            while (meeting := member.membership.newest()) is None or member.id in meeting.members:
                time.sleep(0.05)

    with world(job("diloco(every=1)")) as run:
        run.start(2, min_ranks=3)
        (stopped,) = run.start(1, min_ranks=3, before=sleep)
    assert isinstance(run.errors[stopped.id], LeftBehind)
    assert "went on without rank 2" in str(run.errors[stopped.id])
    assert len(stopped.record.rows) == 1
    rows = check(run).record.rows
    assert stopped.record.rows == rows[:1]
    assert rows[1].lost.keys() == {"2"}
    assert "silent" in rows[1].lost["2"]


def test_a_rank_whose_loss_is_not_finite_leaves_at_once_and_the_others_go_on() -> None:
    def spoil(at: str, member: Mortal) -> None:
        if at == "train" and member.at.round == 1:
            next(member.trainee.model.parameters()).data.fill_(torch.nan)

    with world(job("local_sgd(every=1)")) as run:
        run.start(1, min_ranks=2)
        run.start(1, min_ranks=2, before=spoil, patience=1000)
    assert "the loss is nan" in str(run.errors[1]) or "not finite" in str(run.errors[1])
    rows = check(run).record.rows
    assert "step" in rows[1].lost["1"]
    assert all(value.isfinite().all() for value in weights(run.alive()[0].trainee.model).values())


def test_members_of_unequal_shares_weigh_by_their_samples() -> None:
    with world(job("local_sgd(every=8)", dataset=data(38), epochs=1)) as run:  # 16, 16 and 6: the last has 3 and 3
        run.start(2, min_ranks=2)
    (row,) = check(run).record.rows
    assert row.samples == {"0": 19, "1": 19}
    with world(job("local_sgd(every=8)", dataset=data(21), epochs=1)) as run:  # 16, and 5 that two share
        run.start(2, min_ranks=2)
    (row,) = check(run).record.rows
    assert row.samples == {"0": 11, "1": 10}
    assert row.weights == {0: 11 / 21, 1: 10 / 21}


def test_a_store_that_is_gone_ends_all_ranks_with_a_message() -> None:
    store = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    port = int(store.stdout.readline())

    def end(at: str, member: Mortal) -> None:
        if at == "train" and member.at.round == 1:
            store.kill()
            store.wait()

    with store, world(job("local_sgd(every=1)")) as run:
        run.connect = lambda: client("127.0.0.1", port)  # type: ignore[method-assign]
        run.notes = Notes(run.connect, "127.0.0.1:5")
        run.start(2, min_ranks=2, before=end)
        run.finish()
    assert [type(error) for error in run.errors.values()] == [StoreLost, StoreLost]
    assert "the store at 127.0.0.1:5 does not answer" in str(run.errors[0])
    assert max(len(member.record.rows) for member in run.members) == 1  # the other may not know that it is committed


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("data_parallel", "data_parallel cannot go on when a rank leaves: its ranks meet in every step"),
        ("daso", "daso cannot go on when a rank leaves: its nodes exchange gradients inside"),
        ("pipeline", "possible: local_sgd, diloco"),
        ("diloco(fragments=2)", "possible: fragments=1 and wait=0"),
        ("diloco(wait=2)", "possible: fragments=1 and wait=0"),
    ],
)
def test_other_strategies_are_refused_before_the_first_step(strategy: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Trainee(job(strategy))


def test_a_replay_of_another_run_says_which_round_differs() -> None:
    with world(job("local_sgd(every=1)", epochs=1)) as run:
        run.start(2, min_ranks=2)
        run.finish()
        rows = run.members[0].record.rows
        spoiled = [*rows[:2], replace(rows[2], checksums={"agreed": 1, "momentum": 0}), *rows[3:]]
        with pytest.raises(RunError, match="round 2 is not the same again"):
            replay(spoiled, run.job, run.again)


@pytest.mark.parametrize("seed", range(3))
def test_deciders_that_race_agree(seed: int) -> None:
    """Some see a member as lost, others see that all have their result whole."""
    store = local_store(1)
    notes = Notes(lambda: client("127.0.0.1", store.port), "the test")
    everyone = Meeting(0, 0, (0, 1, 2), (0, 1, 2), (), 0)
    proposals = [everyone.after_commit([], False), everyone.without({2: "silent"}), everyone.without({1: "silent"})]
    random.Random(seed).shuffle(proposals)
    found: list[object] = []

    def decide(proposal: Meeting) -> None:
        here = notes.another()
        found.append(here.decide("decision/1", asdict(proposal)))

    threads = [threading.Thread(target=decide, args=(one,)) for one in proposals * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == found[0] for one in found)
    assert Meeting.read(found[0]) in proposals  # type: ignore[arg-type]


def test_hearts_are_measured_by_the_clock_of_who_looks() -> None:
    store = local_store(1)
    notes, now = Notes(lambda: client("127.0.0.1", store.port), "the test"), [1000.0]
    watch = Watch(notes, lambda: now[0])
    notes.count("alive/3", 5)
    assert watch.still([3]) == {3: 0}  # however long before
    now[0] += 7
    assert watch.still([3]) == {3: 7}
    notes.count("alive/3", 1)
    now[0] += 2
    assert watch.still([3]) == {3: 0}
    assert watch.still([]) == {}


def test_a_rank_that_waits_for_the_run_to_begin_says_again_and_again_how_many_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("thinwire.elastic.meeting.LOBBY_SECONDS", 0.05, raising=False)
    with world(job()) as ranks:
        said: list[str] = []
        first, second = (Membership(ranks.notes.another(), {}, PATIENCE) for _ in range(2))
        waits = threading.Thread(target=first.enter, args=(Standing(0, 0), 2, said.append), daemon=True)
        waits.start()
        end = time.monotonic() + 10
        while len(said) < 3 and time.monotonic() < end:
            time.sleep(0.02)
        second.enter(Standing(0, 0), 2)
        waits.join(20)
        first.close()
        second.close()
    assert said[:3] == ["rank 0 waits until 2 ranks are here; now 1"] * 3
