"""The board: where simulated ranks leave values for each other, and find out when all of them wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thinwire.errors import PeerLost, RunError

Slot = tuple[Any, ...]
STUCK_SECONDS = 0.2  # a rank that saw no change for so long checks whether all ranks wait


class _Wait(NamedTuple):
    """A rank that waits for another one."""

    rank: int
    other: int
    may_end: Callable[[], bool]
    changed: threading.Condition  # told when it may end, and only then


class Board:
    """Values that the threads of one world post for each other, by slot.

    A rank always waits for one other rank. If every rank that has not ended waits, none can continue, and all of them
    raise an error. That check is off if a rank uses several threads, because one of them may still post something.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.threads: set[int] = set()  # that have posted or waited
        self.waiting: dict[int, _Wait] = {}  # by thread
        self.stuck: dict[int, str] = {}  # by thread: who waited for whom, when no rank could continue
        self.lock = threading.RLock()
        self.posts: dict[Slot, Any] = {}
        self.num_reads: dict[Slot, int] = {}
        self.ended: dict[int, str] = {}  # rank → why it will post nothing more

    def post(self, slot: Slot, value: Any) -> None:
        """Put a value into a slot."""
        with self.lock:
            self.threads.add(threading.get_ident())
            self.posts[slot] = value
            self._wake()

    def read(self, slot: Slot, me: int, poster: int, readers: int) -> Any:
        """Wait for a rank's post and return it; the last of its readers removes it."""
        with self.lock:
            self._wait(me, poster, lambda: slot in self.posts)
            value = self.posts[slot]
            self.num_reads[slot] = self.num_reads.get(slot, 0) + 1
            if self.num_reads[slot] == readers:
                del self.posts[slot], self.num_reads[slot]
                self._wake()
            return value

    def wait_until_read(self, slot: Slot, me: int, reader: int) -> None:
        """Wait until a rank, the only reader of a post, has read it."""
        with self.lock:
            self._wait(me, reader, lambda: slot not in self.posts)

    def has(self, slots: Sequence[Slot]) -> bool:
        """Whether there is a post in each of the slots."""
        with self.lock:
            return all(slot in self.posts for slot in slots)

    def end(self, rank: int, why: str) -> None:
        """A rank has ended: whoever waits for it raises an error."""
        with self.lock:
            self.ended[rank] = why
            self._wake()

    def _wait(self, me: int, other: int, has_happened: Callable[[], bool]) -> None:
        """Wait for what another rank does; it may end instead, or wait for this one."""
        thread = threading.get_ident()
        self.threads.add(thread)
        if has_happened():
            return
        changed = threading.Condition(self.lock)
        wait = _Wait(me, other, lambda: has_happened() or other in self.ended, changed)
        self.waiting[thread] = wait
        while not wait.may_end() and thread not in self.stuck:
            if not changed.wait(STUCK_SECONDS):
                self._find_stuck_ranks()
        del self.waiting[thread]
        stuck = self.stuck.pop(thread, "")
        if has_happened():
            return
        if not stuck:
            raise PeerLost(f"lost contact with rank {other} ({self.ended[other]})")
        raise RunError(f"ranks wait for each other: {stuck}; every rank must make the same calls in the same order")

    def _wake(self) -> None:
        """Wake the ranks that may go on; to wake all whenever something changed would cost more than what they do."""
        for wait in self.waiting.values():
            if wait.may_end():
                wait.changed.notify()

    def _find_stuck_ranks(self) -> None:
        waits = self.waiting.values()
        all_wait = len(waits) == self.num_ranks - len(self.ended) and len(self.threads) <= self.num_ranks
        if all_wait and not self.stuck and not any(wait.may_end() for wait in waits):
            pairs = sorted((wait.rank, wait.other) for wait in waits)
            message = ", ".join(f"rank {rank} for rank {other}" for rank, other in pairs)
            self.stuck = dict.fromkeys(self.waiting, message)
            for wait in waits:
                wait.changed.notify()
