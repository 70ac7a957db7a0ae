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
from dataclasses import asdict, replace
from typing import Any

from thinwire.elastic.groups import OPERATION_SECONDS
from thinwire.elastic.hearts import BEATS, LONGEST_BEAT, Heart, Steps, Watch
from thinwire.elastic.meeting import Failures, Meeting, Standing, left_behind, now_and_then
from thinwire.elastic.notes import Notes

SUSPICION = 0.2  # share of the patience that is enough once a connection broke
POLL_SECONDS = (0.005, 0.1)  # between two looks at the store: the first, and the longest
UNREACHABLE = "its connections to the others fail"
HANGS = "it lives, but its training hangs"


class Membership:
    """A rank's part in the membership of a run."""

    def __init__(self, notes: Notes, about: dict[str, Any], patience: float, claim: int | None = None) -> None:
        self.notes, self.patience = notes, patience
        self.id = self._register(about, claim)
        self.watch = Watch(notes, longest=patience / 10)
        self.heart = Heart(notes.another(), self.id, min(patience / BEATS, LONGEST_BEAT))
        self._said: set[str] = set()
        self._failures = Failures(patience)
        self.steps = Steps(notes, patience)

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
        self.notes.append("lobby", {"id": self.id, **asdict(standing)})
        slot = next(i for i, one in enumerate(self.notes.entries("lobby")) if one["id"] == self.id)
        newest, pause, came, is_due = -1, POLL_SECONDS[0], time.monotonic(), now_and_then()
        while True:
            meeting, is_patient = self.newest(newest), time.monotonic() - came < self.patience
            if meeting is None:
                self._open(min_ranks, is_patient)
                if (least := max(min_ranks, standing.others * is_patient)) > 1 and is_due():
                    say(f"rank {self.id} waits until {least} ranks are here; now {len(self._living(self._waiting(0)))}")
            elif self.id in meeting.members or (meeting.ended and meeting.committed):
                return meeting
            elif slot < meeting.lobby:
                raise left_behind(self.id, meeting)
            elif self._are_gone(meeting):
                waiting = self._waiting(meeting.lobby)
                if max((one["round"] for one in waiting), default=0) > 0:  # a state that was saved
                    self._open(min_ranks, is_patient, meeting)
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

    def _open(self, min_ranks: int, is_patient: bool, before: Meeting | None = None) -> None:
        """Begin the run, or go on with it, if enough ranks are here: with the state that is furthest.

        Ranks that were resumed are patient until all are here that made their last round: one may be further.
        """
        number, first = (0, 0) if before is None else (before.number + 1, before.lobby)
        waiting = self._waiting(first)
        here = self._living(waiting)
        if len(here) < max(min_ranks, *(int(one["others"]) * is_patient for one in here), 1):
            return
        furthest = max(here, key=lambda one: int(one["round"]))  # the first of them
        newcomers = [one["id"] for one in here
                     if (one["round"], one["fingerprint"]) != (furthest["round"], furthest["fingerprint"])]  # fmt: skip
        resumed = {str(one["id"]): one["was"] for one in here if one["was"] >= 0 and one["id"] not in newcomers}
        members, lobby, at = tuple(one["id"] for one in here), first + len(waiting), int(furthest["round"])
        self._decide(Meeting(number, at, members, members, tuple(newcomers), number, lobby=lobby, resumed=resumed))

    def _waiting(self, first: int) -> list[dict[str, Any]]:
        """Those who came after the first so many."""
        return self.notes.entries("lobby")[first:]

    def _living(self, waiting: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of them who have not left again. Who is passed over although it lives comes again."""
        lost = self._lost([one["id"] for one in waiting], self.patience) if waiting else {}
        return [one for one in waiting if one["id"] not in lost]

    def leave(self, why: str) -> None:
        """Tell the others at once that this rank ends, so that they need not be patient."""
        self.heart.stop()
        self.notes.append("gone", {"id": self.id, "why": why})

    def count_step(self) -> None:
        """Say that this rank has made a step of training."""
        self.heart.steps += 1

    def close(self) -> None:
        """Stop without a word."""
        self.heart.stop()

    # ---- an attempt

    def wait(
        self, meeting: Meeting, is_done: Callable[[], bool], late: Callable[[], Sequence[int]] = tuple
    ) -> Meeting | None:
        """Wait until something is done (None), or until the attempt is decided: then it is in vain.

        Who is `late` after the patience, and whose training stands still for long, is lost although its heart beats.
        """
        pause, begin = POLL_SECONDS[0], time.monotonic()
        while not is_done():
            decided = self.look(meeting)
            if decided is not None:
                return decided
            hanging = self.steps.hanging(meeting.number, meeting.members, OPERATION_SECONDS)
            if hanging and time.monotonic() - begin > self.patience and (lost := hanging & {*late()}):
                return self._void(meeting, dict.fromkeys(sorted(lost), HANGS))
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

    def say_has_state(self, meeting: Meeting, giver: int) -> None:
        """Say from whom this rank has got the state of the run; -1 if it has none, or is about to get another one."""
        self.notes.write(f"has/{meeting.round}/{self.id}", giver)

    def say_failed(self, meeting: Meeting, unreached: Sequence[Sequence[int]] = ()) -> None:
        """Say that this rank cannot finish an attempt: a connection broke, or these pairs of members have none."""
        if unreached:
            self.notes.write(f"unreached/{meeting.number}", unreached)
        self._say(f"failed/{meeting.number}/{self.id}")
        self._say(f"failed/{meeting.number}")

    def unreached(self, meeting: Meeting) -> list[list[int]]:
        """Pairs of members that could not connect in an attempt: who tried, and to whom."""
        return list(self.notes.read(f"unreached/{meeting.number}") or [])

    def has_failed(self, meeting: Meeting) -> bool:
        """Whether somebody cannot finish an attempt."""
        return self.notes.has([f"failed/{meeting.number}"])

    def silent_about(self, meeting: Meeting) -> list[int]:
        """Members that have said neither that they have their result whole, nor that they failed."""
        words = [f"{word}/{meeting.number}" for word in ("whole", "failed")]
        return [one for one in meeting.members if not any(self.notes.has([f"{word}/{one}"]) for word in words)]

    def look(self, meeting: Meeting, may_commit: bool = False, is_last: bool = False) -> Meeting | None:
        """What was decided after an attempt; decides it if that is possible now, else None."""
        number, members = meeting.number, meeting.members
        found = self.notes.read(f"decision/{number + 1}")
        if found is not None:
            return Meeting.read(found)
        if may_commit and self.notes.has([f"whole/{number}/{one}" for one in members]):
            waiting = self._waiting(meeting.lobby)
            newcomers = [one["id"] for one in self._living(waiting)]
            return self._decide(meeting.after_commit(newcomers, is_last, len(waiting)))
        has_failed = self.has_failed(meeting)
        lost = self._lost(members, self.patience * (SUSPICION if has_failed else 1))
        if lost:
            return self._void(meeting, lost)
        if has_failed and not self.silent_about(meeting):  # all are there: only a connection broke
            return self._again(meeting)
        return None

    def _again(self, meeting: Meeting) -> Meeting | None:
        """Void an attempt that nobody was lost in. If connections fail again and again, and for longer than others are
        patient, those are left out who are at fault."""
        is_long, may_begin = self._failures.see(meeting)
        out = meeting.at_fault(self.unreached(meeting)) if is_long else []
        return self._void(meeting, dict.fromkeys(out, UNREACHABLE)) if out or may_begin else None

    def _void(self, meeting: Meeting, lost: dict[int, str]) -> Meeting:
        """Decide that an attempt is void. If nobody is left but newcomers, those go on who got the state already."""
        after = meeting.without(lost)
        if after.ended:
            given = {str(one): self.notes.read(f"has/{meeting.round}/{one}") for one in after.members}
            heirs = {one: giver for one, giver in given.items() if str(giver) in after.lost}
            first = next(iter(heirs.values()), None)  # all from one
            heirs = {one: giver for one, giver in heirs.items() if giver == first}
            after = replace(after, heirs=after.heirs | heirs, ended=not heirs)
        return self._decide(after)

    def _lost(self, members: Sequence[int], patience: float) -> dict[int, str]:
        """Members whose heart stands still, or who said that they leave."""
        others = [one for one in members if one != self.id]
        still = self.watch.still(others)
        lost = {one: f"silent for {seconds:.0f} s" for one, seconds in still.items() if seconds > patience}
        return lost | {gone["id"]: gone["why"] for gone in self.notes.entries("gone") if gone["id"] in others}

    def _decide(self, proposed: Meeting) -> Meeting:
        decided = Meeting.read(self.notes.decide(f"decision/{proposed.number}", asdict(proposed)))
        if decided.ended and decided.committed:  # else a rank that was silent may come again with its state
            self._say("finished")
        return decided

    def _say(self, key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.notes.write(key)
