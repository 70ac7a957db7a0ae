"""Hearts: counters in the store that tell whether a rank lives. No two machines compare their clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from thinwire.elastic.notes import Notes, StoreLost

BEATS = 40  # of a heart while others would be patient


class Watch:
    """How long hearts have stood still, as this rank sees it."""

    def __init__(self, notes: Notes, clock: Callable[[], float] = time.monotonic) -> None:
        self.notes, self.clock = notes, clock
        self._seen: dict[int, tuple[int, float]] = {}

    def still(self, members: Sequence[int]) -> dict[int, float]:
        """Seconds since each heart was first seen at its present count."""
        if not members:
            return {}
        counts = self.notes.counts([f"alive/{one}" for one in members])
        now = self.clock()
        for one, count in zip(members, counts, strict=True):
            if self._seen.get(one, (-1, 0.0))[0] != count:
                self._seen[one] = (count, now)
        return {one: now - self._seen[one][1] for one in members}


class Heart:
    """Beats in the store until it is stopped."""

    def __init__(self, notes: Notes, member: int, seconds: float) -> None:
        self._notes, self._key, self._seconds = notes, f"alive/{member}", seconds
        self._stopped = threading.Event()
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
        while not self._stopped.wait(self._seconds):
            try:
                self._notes.count(self._key, 1)
                self._notes.count("beats", 1)
            except StoreLost:
                return  # the main thread finds out, too
