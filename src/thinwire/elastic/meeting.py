"""A meeting: one attempt to commit a round, who makes it, and which attempt may follow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.comm.reach import MOST_PEERS
from thinwire.errors import RunError

TRIES = 3  # of members whose hearts all beat, and whose connections fail: then those may be left out who are at fault
LOBBY_SECONDS = 30.0  # between two lines of a rank that waits for the run to begin
PAUSE_SECONDS = 0.005  # after the second attempt that failed; then twice as long each time


@dataclass(frozen=True)
class Meeting:
    """One attempt to commit a round, and who makes it. Members are named by ids, which are never used again."""

    number: int  # of the attempt
    round: int
    members: tuple[int, ...]  # in the order of their places in the group
    began: tuple[int, ...]  # those who began the round: their order decides who trains which samples
    newcomers: tuple[int, ...]  # those of them who had nothing when the round began
    group: int  # the first attempt that was made by these members
    lost: dict[str, str] = field(default_factory=dict)  # in this round: id → why
    committed: bool = True  # whether the attempt before was
    lobby: int = 0  # entries of the lobby that were let in so far
    failures: int = 0  # attempts at this round before, one after the other, that failed although nobody was lost
    resumed: dict[str, int] = field(default_factory=dict)  # id → the id that a rank had before it was resumed
    heirs: dict[str, int] = field(default_factory=dict)  # newcomers that have the state → the lost member that gave it
    ended: bool = False  # the run is finished or, without members, lost

    @staticmethod
    def read(found: dict[str, Any]) -> Meeting:
        """A meeting from its JSON."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in found.items()
        }
        return Meeting(**values)

    def after_commit(self, newcomers: Sequence[int], is_last: bool, entries: int = 0) -> Meeting:
        """The next round, with newcomers: those who wait, by so many entries of the lobby, and are not gone again."""
        members, number = (*self.members, *newcomers), self.number + 1
        group = number if newcomers else self.group
        lobby = self.lobby + entries
        return Meeting(number, self.round + 1, members, members, tuple(newcomers), group, lobby=lobby, ended=is_last)

    def without(self, lost: dict[int, str]) -> Meeting:
        """The same round again, by those who are left. If none of them has the state of the run, it is lost."""
        number, members = self.number + 1, tuple(one for one in self.members if one not in lost)
        known = self.lost | {str(one): why for one, why in lost.items()}
        failures, after = 0 if lost else self.failures + 1, replace(self, members=members)
        return replace(
            after, number=number, group=number, lost=known, committed=False, ended=not after.with_state,
            failures=failures,
        )  # fmt: skip

    def at_fault(self, unreached: Sequence[Sequence[int]]) -> list[int]:
        """Whom to leave out if these pairs of members cannot connect: who fails with most others, and with over half.

        A pair counts for both. Of several, it is the one that more of the others cannot reach, then the last to come.
        If it alone has the state of the run, it stays, and those go that it cannot connect with.
        """
        partners = {one: {a if b == one else b for a, b in unreached if one in (a, b)} for one in self.members}
        named = [to for _, to in unreached]
        worst = max(self.members, key=lambda one: (len(partners[one]), named.count(one), self.members.index(one)))
        if 2 * len(partners[worst]) <= min(len(self.members) - 1, MOST_PEERS):
            return []
        return sorted(partners[worst]) if self.without({worst: ""}).ended else [worst]

    @property
    def with_state(self) -> list[int]:
        """Members that have the state of the run, so that they can give it to the others."""
        return [one for one in self.members if one not in self.newcomers or str(one) in self.heirs]


class Failures:
    """Attempts, one after the other, that failed although nobody was lost: how long this rank has seen them."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._first, self._last = (-1, 0.0), (-1, 0.0)  # the number of that attempt, and when it was seen

    def see(self, meeting: Meeting) -> tuple[bool, bool]:
        """After an attempt that failed: whether they have for too long, and whether the next one may begin."""
        now, first = time.monotonic(), meeting.number - meeting.failures
        self._first = self._first if self._first[0] == first else (first, now)
        self._last = self._last if self._last[0] == meeting.number else (meeting.number, now)
        pause = min(PAUSE_SECONDS * 2 ** min(meeting.failures, 20), self._patience / 10) if meeting.failures else 0.0
        is_long = meeting.failures + 1 >= TRIES and now - self._first[1] > self._patience
        return is_long, now - self._last[1] >= pause


@dataclass(frozen=True)
class Standing:
    """What a rank brings when it comes: the round of its state, and a fingerprint of it."""

    round: int
    fingerprint: int
    was: int = -1  # its id when it had that state
    others: int = 0  # ranks that made the round before, with itself


def now_and_then() -> Callable[[], bool]:
    """Whether it is time for a line again: at once, and then each time that enough seconds are over."""
    said = -math.inf

    def is_due() -> bool:
        nonlocal said
        if time.monotonic() - said < LOBBY_SECONDS:
            return False
        said = time.monotonic()
        return True

    return is_due


class LeftBehind(RunError):
    """The others went on without this rank: it was silent for too long."""


def left_behind(member: int, meeting: Meeting) -> LeftBehind:
    """The error of a member that an attempt is not made by."""
    return LeftBehind(f"the others went on without rank {member} ({meeting.lost.get(str(member), 'it was silent')})")
