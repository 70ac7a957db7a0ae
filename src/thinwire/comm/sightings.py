"""What one rank sees of the others: where they were when it last looked, and who gives no sign of life."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from thinwire.comm.whereabouts import Operation, Whereabouts, describe, find_late
from thinwire.common.durations import format_duration

SILENT_BEATS = 3  # missed by a rank that counts as silent
ANSWER_SECONDS = 5.0  # that the store may take: several round trips on a slow link


class Sightings:
    """Reads from the store what other ranks have written there. Time is counted in this rank's own beats."""

    def __init__(self, store: Any, rank: int, members: Sequence[int], beat_seconds: float) -> None:
        self.store = store.clone()  # a connection of its own: it may hang
        self.store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self.rank, self.members, self.beat_seconds = rank, members, beat_seconds
        self.hosts: dict[int, str] = {}
        self.found: dict[int, Whereabouts] = {}
        self._beat = 0  # of the last look
        self._changed: dict[int, int] = {}  # our beat when we first saw the last beat of a rank
        self._lock = threading.Lock()

    def look(self, beat: int, own: Whereabouts) -> bool:
        """Read where the others are. Two looks some beats apart show who is silent."""
        with self._lock:
            if not self.hosts:
                names = self.store.multi_get([f"host/{rank}" for rank in self.members])
                self.hosts = {rank: name.decode() for rank, name in zip(self.members, names, strict=True)}
            texts = self.store.multi_get([f"at/{rank}" for rank in self.members])
            for rank, text in zip(self.members, texts, strict=True):
                now = Whereabouts.from_json(text)
                if rank not in self.found or self.found[rank].beat != now.beat:
                    self._changed[rank] = beat
                self.found[rank] = now
            self.found[self.rank], self._changed[self.rank], self._beat = own, beat, beat
        return True

    @property
    def silent(self) -> set[int]:
        """Ranks whose process is stopped or cannot be reached."""
        return {rank for rank, beat in self._changed.items() if self._beat - beat >= SILENT_BEATS}

    @property
    def lowest_waiting(self) -> int:
        """The lowest rank that waits and can say so."""
        return min([self.rank, *(r for r, one in self.found.items() if one.waiting and r not in self.silent)])

    def late(self, operation: Operation) -> dict[int, Operation]:
        """The ranks that an operation waits for."""
        return find_late(operation, self.found, self.silent)

    def describe(self, operation: Operation, late: dict[int, Operation], age: float) -> str:
        """Who is late, and what is known of them."""
        return describe(late, {rank: self._state(rank) for rank in late}, age, operation)

    def _state(self, rank: int) -> str:
        doing = self.found[rank].doing
        parts = [f"on {self.hosts[rank]}"] if self.hosts[rank] != self.hosts[self.rank] else []
        if rank in self.silent:
            silence = (self._beat - self._changed[rank]) * self.beat_seconds
            parts += [f"no sign of life for {format_duration(silence)}", f"last: {doing}" if doing else ""]
        else:
            parts += [f"busy: {doing}" if doing else "busy"]
        return "; ".join(filter(None, parts))


def ask_in_time(question: Callable[[], Any]) -> Any:
    """The answer to a question to a store; None if there is none in time. torch would wait for a stopped store."""
    answers: list[Any] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answers.append(question())

    thread = threading.Thread(target=ask, name="thinwire-watch-asks", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers[0] if answers else None
