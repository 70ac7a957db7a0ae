"""Who is in a run. Every decision is one compare_set in the store, so nobody leads and two deciders cannot disagree.

A run is a chain of attempts, each to commit a round. `decision/n` says who makes attempt n, and what became of the one
before it:

    committed   all members said that they have the result whole: all merge it, and the next round begins
    void        a member was lost: nobody merges, and those who are left make the next attempt at the same round

No two machines compare their clocks. A heart is a counter in the store. Whoever looks at it measures by its own
monotonic clock how long the counter has stood still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from thinwire.elastic.hearts import BEATS, Heart, Watch
from thinwire.elastic.meeting import Meeting, Standing
from thinwire.elastic.notes import Notes
from thinwire.errors import RunError

SUSPICION = 0.2  # share of the patience that is enough once a connection broke
POLL_SECONDS = (0.005, 0.1)  # between two looks at the store: the first, and the longest


class LeftBehind(RunError):
    """The others went on without this rank: it was silent for too long."""


class Membership:
    """A rank's part in the membership of a run."""

    def __init__(self, notes: Notes, about: dict[str, Any], patience: float, claim: int | None = None) -> None:
        self.notes, self.patience = notes, patience
        self.id = self._register(about, claim)
        self.watch = Watch(notes)
        self.heart = Heart(notes.another(), self.id, patience / BEATS)
        self._said: set[str] = set()

    def _register(self, about: dict[str, Any], claim: int | None) -> int:
        """An id of its own; the one that it had before the run was resumed, if nobody else has claimed it."""
        mine = {**about, "key": time.time_ns()}
        if claim is not None and self.notes.decide(f"member/{claim}", mine) == mine:
            return claim
        while True:
            number = self.notes.count("ids", 1) - 1
            if self.notes.decide(f"member/{number}", mine) == mine:
                return number

    def about(self, member: int) -> dict[str, Any]:
        """What a member said of itself."""
        return dict(self.notes.read(f"member/{member}") or {})

    # ---- coming and going

    def enter(self, standing: Standing, min_ranks: int, say: Callable[[str], None] = lambda text: None) -> Meeting:
        """Wait until this rank is let in, at the beginning of a round; the first ones begin the run."""
        slot = self.notes.count("lobby", 1) - 1
        self.notes.write(f"lobby/{slot}", {"id": self.id, **asdict(standing)})
        if not self.notes.has(["decision/0"]):
            say(f"rank {self.id} waits until {min_ranks} ranks are here")
        newest, pause = -1, POLL_SECONDS[0]
        while True:
            meeting = self.newest(newest)
            if meeting is None:
                self._open(min_ranks)
            elif self.id in meeting.members or (meeting.ended and meeting.committed):
                return meeting
            elif self._are_gone(meeting):
                waiting = self._waiting(meeting.lobby)
                if max((one["round"] for one in waiting), default=0) > 0:  # a state that was saved
                    self._open(min_ranks, meeting)
                elif meeting.ended:
                    return meeting
                else:
                    self._decide(meeting.without(dict.fromkeys(meeting.members, "silent")))
            elif newest < 0:
                say(f"rank {self.id} waits for the end of round {meeting.round}")
            newest = -1 if meeting is None else meeting.number
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])

    def _are_gone(self, meeting: Meeting) -> bool:
        """Whether nobody of a meeting is left."""
        return all(seconds > self.patience for seconds in self.watch.still(meeting.members).values())

    def newest(self, known: int = -1) -> Meeting | None:
        """The newest decision, if there is any; `known` is the number of one that is there."""
        low, step = known, 1
        while self.notes.has([f"decision/{low + step}"]):
            low, step = low + step, 2 * step
        while step > 1:
            step //= 2
            if self.notes.has([f"decision/{low + step}"]):
                low += step
        found = self.notes.read(f"decision/{low}") if low >= 0 else None
        return found and Meeting.read(found)

    def _open(self, min_ranks: int, before: Meeting | None = None) -> None:
        """Begin the run, or go on with it, if enough ranks are here: with the state that is furthest."""
        number, first = (0, 0) if before is None else (before.number + 1, before.lobby)
        here = self._waiting(first)
        if len(here) < min_ranks:
            return
        furthest = max(here, key=lambda one: int(one["round"]))  # the first of them
        newcomers = [one["id"] for one in here
                     if (one["round"], one["fingerprint"]) != (furthest["round"], furthest["fingerprint"])]  # fmt: skip
        members, lobby = tuple(one["id"] for one in here), first + len(here)
        self._decide(Meeting(number, furthest["round"], members, members, tuple(newcomers), number, lobby=lobby))

    def _waiting(self, first: int) -> list[dict[str, Any]]:
        """Those who came after the first so many."""
        found = []
        for slot in range(first, self.notes.count("lobby")):
            one = self.notes.read(f"lobby/{slot}")
            if one is None:
                break
            found.append(one)
        return found

    def leave(self, why: str) -> None:
        """Tell the others at once that this rank ends, so that they need not be patient."""
        self.heart.stop()
        slot = self.notes.count("gone", 1) - 1
        self.notes.write(f"gone/{slot}", {"id": self.id, "why": why})

    def close(self) -> None:
        """Stop without a word."""
        self.heart.stop()

    # ---- an attempt

    def wait(self, meeting: Meeting, is_done: Callable[[], bool]) -> Meeting | None:
        """Wait until something is done (None), or until the attempt is decided: then it is in vain."""
        pause = POLL_SECONDS[0]
        while not is_done():
            decided = self.look(meeting)
            if decided is not None:
                return decided
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
        return None

    def settle(self, meeting: Meeting, is_last: bool) -> Meeting:
        """Say that this rank has its result whole, and wait for the decision."""
        self._say(f"whole/{meeting.number}/{self.id}")
        pause = POLL_SECONDS[0]
        while (decided := self.look(meeting, may_commit=True, is_last=is_last)) is None:
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
        return decided

    def say_failed(self, meeting: Meeting) -> None:
        """Say that this rank cannot finish an attempt: a connection broke."""
        self._say(f"failed/{meeting.number}")
        self._say(f"failed/{meeting.number}/{self.id}")

    def has_failed(self, meeting: Meeting) -> bool:
        """Whether somebody cannot finish an attempt."""
        return self.notes.has([f"failed/{meeting.number}"])

    def look(self, meeting: Meeting, may_commit: bool = False, is_last: bool = False) -> Meeting | None:
        """What was decided after an attempt; decides it if that is possible now, else None."""
        number, members = meeting.number, meeting.members
        found = self.notes.read(f"decision/{number + 1}")
        if found is not None:
            return Meeting.read(found)
        if may_commit and self.notes.has([f"whole/{number}/{one}" for one in members]):
            newcomers = [one["id"] for one in self._waiting(meeting.lobby)]
            return self._decide(meeting.after_commit(newcomers, is_last))
        has_failed = self.has_failed(meeting)
        lost = self._lost(members, self.patience * (SUSPICION if has_failed else 1))
        if lost:
            return self._decide(meeting.without(lost))
        if has_failed and all(
            self.notes.has([f"{word}/{number}/{one}"])
            for one in members
            for word in ["whole" if self.notes.has([f"whole/{number}/{one}"]) else "failed"]
        ):
            return self._decide(meeting.without({}))  # all are there: only a connection broke
        return None

    def _lost(self, members: Sequence[int], patience: float) -> dict[int, str]:
        """Members whose heart stands still, or who said that they leave."""
        others = [one for one in members if one != self.id]
        still = self.watch.still(others)
        lost = {one: f"silent for {seconds:.0f} s" for one, seconds in still.items() if seconds > patience}
        for slot in range(self.notes.count("gone")):
            gone = self.notes.read(f"gone/{slot}")
            if gone is not None and gone["id"] in others:
                lost[gone["id"]] = gone["why"]
        return lost

    def _decide(self, proposed: Meeting) -> Meeting:
        decided = Meeting.read(self.notes.decide(f"decision/{proposed.number}", asdict(proposed)))
        if decided.ended:
            self._say("finished")
        return decided

    def _say(self, key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.notes.write(key)
