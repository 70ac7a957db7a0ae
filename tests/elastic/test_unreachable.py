"""Ranks that reach the store, but not each other: who is left out, and who is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.elastic.runs import Mortal, job, world
from tests.elastic.test_leaving import NEW, notes, waiting
from tests.elastic.test_rounds import check
from thinwire.comm.reach import Unreached, gather_through
from thinwire.elastic import groups
from thinwire.elastic.groups import Unreachable
from thinwire.elastic.meeting import LeftBehind, Meeting
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes
from thinwire.errors import RunError

PATIENCE = 3.0
FAULTS: dict[str, Callable[[int, int, int], bool]] = {  # whether one reaches another, if one of the three is bad
    "others cannot reach it": lambda bad, one, other: other != bad,
    "it cannot reach others": lambda bad, one, other: one != bad,
    "neither": lambda bad, one, other: bad not in (one, other),
}


def cut(monkeypatch: pytest.MonkeyPatch, reaches: Callable[[int, int], bool]) -> list[float]:
    """Let ranks connect by this rule alone. Returns when they tried in vain."""
    real, failed = groups.find_unreached, list[float]()

    def find_unreached(store: Any, rank: int, size: int, address: str, among: Sequence[int]) -> list[Unreached]:
        assert real(store, rank, size, address, among) == []
        ids = gather_through(store, "ids", rank, size, int(address.rpartition(".")[2]) - 1)
        pairs = [(one, to) for one in among for to in among if one != to and not reaches(ids[one], ids[to])]
        pairs = gather_through(store, "pairs", rank, size, pairs)[0]  # the rule may change meanwhile
        failed.extend([time.monotonic()] * bool(pairs))
        return [Unreached(one, to, "", 0, "refused") for one, to in pairs]

    monkeypatch.setattr(groups, "find_unreached", find_unreached)
    return failed


def start(run: Any, count: int, **options: Any) -> None:
    """Start ranks one after the other, so that their ids are their places."""
    for number in range(count):
        run.start(1, min_ranks=count, patience=PATIENCE, **options)
        waiting(run, number + 1)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_cannot_connect_is_left_out_wherever_it_is_and_the_others_go_on(
    fault: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the store: every attempt with it fails, and all hearts beat."""
    failed = cut(monkeypatch, lambda one, other: FAULTS[fault](bad, one, other))
    with world(job("diloco(every=1)", epochs=1)) as run:
        start(run, 3)
    assert list(run.errors) == [bad]
    assert isinstance(run.errors[bad], RunError)
    assert not isinstance(run.errors[bad], LeftBehind)
    assert f"rank {bad} cannot take part: it reaches the store, but its connections" in str(run.errors[bad])
    rows = check(run).record.rows
    assert rows[-1].members == [one for one in range(3) if one != bad]
    assert [one for row in rows for one in row.lost] == [str(bad)]
    assert failed[-1] - failed[0] < 3 * PATIENCE, "as long as ranks are patient, and a last attempt"


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_member_whose_ports_are_closed_later_is_left_out_and_not_those_that_it_met(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet anew because another rank comes; 3 is that one."""
    cut(monkeypatch, lambda one, other: len(run.members) < 4 or other != bad)

    def later(at: str, one: Mortal) -> None:
        if at == "train" and one.at.round == 1:
            if one.id == 0:
                run.start(1, patience=PATIENCE)
            waiting(run, 4)

    with world(job("diloco(every=1)", epochs=3)) as run:
        start(run, 3, before=later)
    assert list(run.errors) == [bad]
    assert isinstance(run.errors[bad], LeftBehind) == (bad < 3), "who has merged a round tries once more"
    rows = check(run).record.rows
    assert rows[-1].members == [one for one in range(4) if one != bad]


def test_a_rank_that_alone_has_the_state_stays_and_newcomers_that_cannot_reach_it_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut(monkeypatch, lambda one, other: other != 0)

    def later(at: str, one: Mortal) -> None:
        if at == "train" and one.at.round == 1 and len(run.members) == 1:
            run.start(2, patience=PATIENCE)
            waiting(run, 3)

    with world(job("diloco(every=1)", epochs=1)) as run:
        start(run, 1, before=later)
    assert sorted(run.errors) == [1, 2]
    assert all("cannot take part" in str(error) for error in run.errors.values())
    assert check(run).record.rows[-1].members == [0]


def test_nobody_is_left_out_if_no_rank_fails_with_most_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, lines = time.monotonic(), list[str]()
    failed = cut(monkeypatch, lambda one, other: {one, other} != {1, 2} or time.monotonic() - begin > 3 * PATIENCE)

    def listen(at: str, one: Mortal) -> None:
        if one.id == 0:
            one.say = lines.append

    with world(job("diloco(every=1)", epochs=1)) as run:
        start(run, 4, before=listen)
    assert not run.errors
    assert failed[-1] - failed[0] > 1.5 * PATIENCE
    assert not any(row.lost for row in check(run).record.rows)
    assert lines.count("round 0: ranks cannot connect (1 to 2, 2 to 1); they try again") == 1


def test_attempts_that_fail_for_hours_are_made_again_at_intervals() -> None:
    """Twice as long each time would be more than a float can hold after a thousand attempts."""
    with notes() as here:
        one = Membership(here, {}, 2.0)
        meeting = one.enter(NEW, 1)
        meeting = one._decide(replace(meeting.without({}), failures=5000))
        one.say_failed(meeting)
        assert one.look(meeting) is None
        time.sleep(0.3)
        after = one.look(meeting)
        assert after is not None
        assert after.failures == 5001
        one.close()


def test_who_is_at_fault() -> None:
    def out(size: int, *pairs: tuple[int, int], newcomers: Sequence[int] = ()) -> list[int]:
        members = tuple(range(size))
        return Meeting(0, 0, members, members, tuple(newcomers), 0).at_fault(pairs)

    assert out(3) == []
    for bad in range(3):
        others = [one for one in range(3) if one != bad]
        assert out(3, *((one, bad) for one in others)) == [bad]
        assert out(3, *((bad, one) for one in others)) == [bad]
    assert out(4, (1, 2), (2, 1)) == [], "a connection is broken, and neither is at fault more than the other"
    assert out(4, (0, 1), (1, 0), (0, 2), (2, 0), (1, 3), (3, 1)) == [1], "each fails with two: the last to come"
    assert out(2, (1, 0)) == [0]
    assert out(2, (0, 1), (1, 0)) == [1]
    assert out(3, (1, 0), (2, 0), newcomers=[1, 2]) == [1, 2], "0 alone has the state"
    assert out(3, (1, 0), (2, 0), newcomers=[2]) == [0]


def test_members_find_out_together_who_cannot_be_reached() -> None:
    """This machine does not have the address of rank 1, so nobody listens there; rank 2 has said none."""
    found: dict[int, list[tuple[int, int]]] = {}

    def attempt(here: Notes, place: int) -> None:
        with pytest.raises(Unreachable) as error:
            groups.try_connections(here, 7, place, ["127.0.0.1", "192.0.2.1", "", "127.0.0.1"])
        found[place] = sorted(error.value.pairs)

    with notes() as here:
        threads = [threading.Thread(target=attempt, args=(here.another(), place), daemon=True) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == {place: [(0, 1), (3, 1)] for place in range(4)}
