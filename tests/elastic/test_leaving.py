"""Ranks that nobody can reach, that hang, that are stopped for long, or that leave in the moment of a join."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.elastic.runs import Mortal, data, job, vanish, world
from tests.elastic.test_rounds import check
from thinwire.comm.store import local_store
from thinwire.elastic import groups, keeper, membership
from thinwire.elastic.hearts import Watch
from thinwire.elastic.meeting import LeftBehind, Meeting, Standing
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes, client
from thinwire.errors import PeerLost

NEW = Standing(0, 1)


@contextmanager
def notes() -> Iterator[Notes]:
    store = local_store(1)
    yield Notes(lambda: client("127.0.0.1", store.port), "the test")


def waiting(run: Any, number: int) -> None:
    """Wait until so many ranks have come."""
    while len(run.notes.entries("lobby")) < number:
        time.sleep(0.01)


@pytest.mark.parametrize("another_vanishes", [False, True])
def test_a_rank_whose_training_hangs_is_not_waited_for_for_ever(
    another_vanishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "OPERATION_SECONDS", 2.0)
    monkeypatch.setattr(membership, "OPERATION_SECONDS", 2.0)
    go_on = threading.Event()

    def hang(at: str, one: Mortal) -> None:
        if at == "train" and one.at.round == 1:
            assert go_on.wait(60)

    def end(at: str, one: Mortal) -> None:
        if at == "exchange" and one.at.round == 1 and another_vanishes:
            vanish(one)
        if at == "train" and one.at.round == 2:
            go_on.set()

    with world(job("diloco(every=1)", epochs=3)) as run:
        run.start(1, min_ranks=3, before=lambda at, one: go_on.set() if one.at.round > 1 else None, patience=3)
        (hung,) = run.start(1, min_ranks=3, before=hang, patience=3)
        run.start(1, min_ranks=3, before=end, patience=3)
    assert isinstance(run.errors[hung.id], LeftBehind)
    rows = check(run).record.rows
    assert "its training hangs" in rows[1].lost[str(hung.id)]


def test_a_rank_that_trains_slowly_is_waited_for_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes step after step. The operation of the other times out, and that took it for one that hangs."""
    monkeypatch.setattr(groups, "OPERATION_SECONDS", 3.0)
    monkeypatch.setattr(membership, "OPERATION_SECONDS", 3.0)

    def slow(at: str, one: Mortal) -> None:
        if at == "train" and one.at.round == 0:
            real = one.trainee.learner.update
            one.trainee.learner.update = lambda: (time.sleep(2), real())[1]  # type: ignore[method-assign]

    with world(job("diloco(every=4)", epochs=1)) as run:
        run.start(1, min_ranks=2, patience=2)
        run.start(1, min_ranks=2, before=slow, patience=2)
    assert not run.errors
    assert not any(row.lost for row in check(run).record.rows)


def test_a_rank_that_was_let_in_and_given_up_while_it_was_stopped_comes_again() -> None:
    """When it looks again the run is several rounds further. It used to wait to be let in, which had been."""
    with notes() as here:
        first = Membership(here, {}, 60)
        meeting = first.enter(NEW, 1)
        entered, looked = threading.Event(), threading.Event()
        late = Membership(here.another(), {}, 60)
        errors: list[BaseException] = []

        def look_later(known: int = -1) -> Any:
            entered.set()
            assert looked.wait(20)
            return Membership.newest(late, known)

        late.newest = look_later  # type: ignore[method-assign]

        def enter() -> None:
            try:
                late.enter(NEW, 1)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        assert entered.wait(20)
        meeting = first.settle(meeting, is_last=False)
        assert meeting.newcomers == (late.id,)
        meeting = first._decide(meeting.without({late.id: "silent for 60 s"}))
        meeting = first.settle(meeting, is_last=False)
        looked.set()
        thread.join(20)
        assert [type(error) for error in errors] == [LeftBehind]
        assert "the others went on without rank 1" in str(errors[0])
        first.close()
        late.close()


def test_a_rank_that_ends_while_it_comes_blocks_nobody() -> None:
    """Between two words to the store it has a number, and no entry in the lobby."""

    class Ended(BaseException):
        pass

    with notes() as here:
        first = Membership(here, {}, 60)
        meeting = first.enter(NEW, 1)
        ending, number = Membership(here.another(), {}, 60), 0
        words = [name for name in ("count", "write", "append", "decide") if hasattr(ending.notes, name)]
        real = {name: getattr(ending.notes, name) for name in words}

        def then_end(name: str, *given: Any) -> Any:
            nonlocal number
            number += 1
            real[name](*given)
            raise Ended

        for name in words:
            setattr(ending.notes, name, lambda *given, name=name: then_end(name, *given))
        with pytest.raises(Ended):
            ending.enter(NEW, 1)
        assert number == 1
        ending.close()
        other = Membership(here.another(), {}, 60)
        thread = threading.Thread(target=other.enter, args=(NEW, 1), daemon=True)
        thread.start()
        for _ in range(3):
            meeting = first.settle(meeting, is_last=False)
            if other.id in meeting.members:
                break
            meeting = first._decide(meeting.without({}))
            time.sleep(0.3)
        thread.join(20)
        assert not thread.is_alive(), "it was never let in"
        first.close()
        other.close()


def test_ranks_that_have_left_do_not_count_for_the_least_number_and_are_not_let_in() -> None:
    with notes() as here:
        gone, first, second = (Membership(here.another(), {}, 60) for _ in range(3))
        here.append("lobby", {"id": gone.id, "round": 0, "fingerprint": 1})
        gone.leave("stopped")
        found: list[Meeting] = []
        thread = threading.Thread(target=lambda: found.append(first.enter(NEW, 2)), daemon=True)
        thread.start()
        time.sleep(0.5)
        assert not found, "it began with one rank and one that had left"
        assert second.enter(NEW, 2).members == (first.id, second.id)
        thread.join(20)
        another = Membership(here.another(), {}, 60)
        here.append("lobby", {"id": another.id, "round": 0, "fingerprint": 1})
        another.leave("stopped")
        second._say(f"whole/0/{second.id}")
        assert first.settle(found[0], is_last=False).newcomers == ()
        for one in (first, second):
            one.close()


def test_a_rank_that_was_stopped_itself_takes_nobody_for_lost() -> None:
    """All ranks of a machine that was suspended wake up at about the same time: what nobody saw does not count."""
    with notes() as here:
        now = [1000.0]
        watch = Watch(here, lambda: now[0], longest=0.6)
        here.count("alive/3", 5)
        assert watch.still([3]) == {3: 0}
        now[0] += 500
        assert watch.still([3])[3] <= 0.6
        for _ in range(20):  # it is really gone
            now[0] += 0.3
            last = watch.still([3])[3]
        assert last == pytest.approx(6.6, abs=0.01)


@pytest.mark.parametrize("patience", [2.0, 30.0, 3600.0])
def test_hearts_beat_for_the_store_however_patient_ranks_are(patience: float) -> None:
    """It ends if no heart beats for a minute, and once the run is finished after three seconds."""
    with notes() as here:
        one = Membership(here, {}, patience)
        assert one.heart._seconds <= keeper.LINGER_SECONDS / 2
        assert one.heart._seconds <= patience / 10
        one.close()


def test_a_run_goes_on_if_the_only_rank_that_had_its_state_leaves_after_it_gave_it() -> None:
    def leave(at: str, one: Mortal) -> None:
        if one.id == 0 and at == "train" and one.at.round == 1:
            run.start(1)
            waiting(run, 2)
        if one.id == 0 and at == "exchange" and one.at.round == 2:
            while run.members[1].trained < 2:
                time.sleep(0.01)
            vanish(one)

    with world(job("local_sgd(every=1, reducer=error_feedback(maxnorm(bits=4)))", epochs=2)) as run:
        run.start(1, before=leave)
    assert list(run.errors) == [0]
    rows = check(run).record.rows
    assert rows[2].joined == [1]
    assert rows[2].members == [1]
    assert rows[2].lost.keys() == {"0"}
    assert rows[-1].epoch == 1


def test_a_state_that_arrives_after_it_was_given_up_changes_nothing() -> None:
    """A member is lost while a newcomer gets the state. The transfer goes on beside the next one, and ends later."""
    done, go_on = threading.Event(), threading.Event()

    def newcomer(at: str, one: Mortal) -> None:
        if at == "gather" and one.comm is None and one.group < 0 and not go_on.is_set():
            real = one.trainee.learner.new_optimizer

            def late(*given: Any) -> None:
                if threading.current_thread().name == "thinwire-elastic" and not done.is_set():
                    done.set()
                    go_on.wait(60)
                real(*given)

            one.trainee.learner.new_optimizer = late  # type: ignore[method-assign]
        if at == "exchange" and not go_on.is_set():
            go_on.set()
            time.sleep(1)  # the old transfer ends here

    def leave(at: str, one: Mortal) -> None:
        if at == "train" and one.at.round == 1:
            if one.id == 0:
                run.start(1, before=newcomer)
            waiting(run, 3)
        if at == "train" and one.at.round == 2 and one.id == 1:
            vanish(one)

    with world(job("local_sgd(every=1)", epochs=4)) as run:
        run.start(2, min_ranks=2, before=leave)
    assert list(run.errors) == [1]
    assert check(run).record.rows[2].joined == [2]


@pytest.mark.parametrize("strategy", ["local_sgd(every=2)", "diloco(every=1)"])
def test_members_that_have_no_samples_in_a_step_agree_with_the_others_on_all_buffers(strategy: str) -> None:
    """The rest of an epoch is too small for all three. BatchNorm's number of batches has no mean, and differed."""
    with world(job(strategy, dataset=data(28))) as run:  # 24, and 4 that two share
        run.start(3, min_ranks=3)
    assert not run.errors
    rows = check(run).record.rows
    assert min(min(row.samples.values()) for row in rows) < max(rows[-1].samples.values())


def test_connections_that_fail_for_a_moment_cost_nobody_its_place() -> None:
    """Attempts that fail at once are made again until others would not be patient any longer."""
    failed: list[float] = []

    def fail() -> None:
        failed.append(time.monotonic())
        if failed[-1] - failed[0] < 2:
            raise PeerLost("the network is unreachable")

    def unplug(at: str, one: Mortal) -> None:
        if at == "exchange" and one.at.round == 1:
            one.trainee.result = fail  # type: ignore[method-assign]

    with world(job("diloco(every=1)")) as run:
        run.start(1, min_ranks=2)
        run.start(1, min_ranks=2, before=unplug)
    assert not run.errors
    assert 3 < len(failed) < 60
    assert not any(row.lost for row in check(run).record.rows)
