"""Hearts: counters in the store that tell whether a rank lives. No two machines compare their clocks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from thinwire.elastic.notes import Notes, StoreLost

BEATS = 40  # of a heart while others would be patient
LONGEST_BEAT = 1.0  # seconds, however patient they are: the process that holds the store listens to hearts, too


class Watch:
    """How long hearts have stood still, or other counters of ranks, as this rank sees it.

    Between two looks at most `longest` seconds count. A rank that was stopped itself, or cut off from the store, has
    seen nothing meanwhile: others may have beaten, or were stopped with it.
    """

    def __init__(
        self, notes: Notes, clock: Callable[[], float] = time.monotonic, longest: float = math.inf, what: str = "alive"
    ) -> None:  # fmt: skip
        self.notes, self.clock, self.longest, self.what = notes, clock, longest, what
        self._seen: dict[int, tuple[int, float]] = {}
        self._watched, self._looked = 0.0, clock()

    def still(self, members: Sequence[int]) -> dict[int, float]:
        """Seconds since the counter of each was first seen at its present count."""
        if not members:
            return {}
        counts = self.notes.counts([f"{self.what}/{one}" for one in members])
        looked, self._looked = self._looked, self.clock()
        self._watched += min(self._looked - looked, self.longest)
        now = self._watched
        for one, count in zip(members, counts, strict=True):
            if self._seen.get(one, (-1, 0.0))[0] != count:
                self._seen[one] = (count, now)
        return {one: now - self._seen[one][1] for one in members}


class Steps:
    """How long the training of members stands still, as a rank sees it that waits for them in an attempt."""

    def __init__(self, notes: Notes, patience: float) -> None:
        self._notes, self._longest, self._number = notes, patience / 10, -1

    def hanging(self, number: int, members: Sequence[int], limit: float) -> set[int]:
        """Members that have made no step for longer than the limit."""
        if self._number != number:
            self._number, self._watch = number, Watch(self._notes, longest=self._longest, what="steps")
        return {one for one, seconds in self._watch.still(members).items() if seconds > limit}


class Heart:
    """Beats in the store until it is stopped, and tells how many steps of training were made."""

    def __init__(self, notes: Notes, member: int, seconds: float) -> None:
        self._notes, self._key, self._seconds = notes, f"alive/{member}", seconds
        self.steps, self._steps_key = 0, f"steps/{member}"
        self._stopped = threading.Event()
        notes.count(self._steps_key, 0)
        notes.count(self._key, 1)
        notes.count("hearts", 1)  # for whoever holds the store
        self._thread = threading.Thread(target=self._beat, name=f"thinwire-heart-{member}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(5)
        with suppress(StoreLost):
            self._notes.count("hearts", -1)

    def _beat(self) -> None:
        told = 0
        while not self._stopped.wait(self._seconds):
            try:
                if (steps := self.steps) > told:
                    self._notes.count(self._steps_key, steps - told)
                    told = steps
                self._notes.count(self._key, 1)
                self._notes.count("beats", 1)
            except StoreLost:
                return  # the main thread finds out, too
