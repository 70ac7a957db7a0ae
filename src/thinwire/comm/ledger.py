"""The ledger: every operation's payload and wire bytes, by purpose, link, operation, group size and part."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from thinwire.comm.timeline import Timeline

Purpose = Literal["train", "sync", "eval", "checkpoint", "start"]


class Key(NamedTuple):
    """The ledger keeps one total for each key."""

    purpose: Purpose
    link: str
    op: str
    ranks: int
    part: int = 0  # of a sequence of strategies, counted from 1; 0 where there is none


@dataclass
class Total:
    """Sums over all operations of one key."""

    calls: int = 0
    payload_bytes: int = 0  # size of the tensors given
    wire_bytes: int = 0  # what this rank put on the network for them
    between_bytes: int = 0  # the part of wire_bytes that left the node
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.in_flight, self.clock_at = 0, 0.0  # started operations, and when one last started or ended


class Ledger:
    """Counts what one rank sends, and (in `timeline`) how long it waited for that.

    >>> ledger = Ledger()
    >>> with ledger.purpose("eval"):
    ...     total = ledger.book("world", "all_reduce", ranks=4, payload_bytes=400, wire_bytes=600, between_bytes=600)
    >>> ledger.wire_bytes, ledger.rows()[0]["purpose"]
    (600, 'eval')
    """

    def __init__(self) -> None:
        self.totals: dict[Key, Total] = {}
        self.timeline = Timeline()
        self.part = 0  # under which operations are booked now
        self._lock = threading.Lock()
        self._purpose = threading.local()  # each thread has a purpose of its own

    @contextmanager
    def purpose(self, purpose: Purpose, instead_of: Purpose | None = None) -> Iterator[None]:
        """Book what this thread sends inside the block under a purpose; outside of any block it is "train".

        With `instead_of`, only if the purpose has been that one; a caller's other purpose stays.
        """
        before = self.current_purpose
        self._purpose.current = purpose if instead_of in (None, before) else before
        try:
            yield
        finally:
            self._purpose.current = before

    @property
    def current_purpose(self) -> Purpose:
        """The purpose under which this thread's operations are booked now."""
        purpose: Purpose = getattr(self._purpose, "current", "train")
        return purpose

    def book(
        self, link: str, op: str, *, ranks: int, payload_bytes: int, wire_bytes: int, between_bytes: int
    ) -> Total:  # fmt: skip
        """Add one operation; returns the total that it is part of, for `start_clock` and `stop_clock`."""
        key = Key(self.current_purpose, link, op, ranks, self.part)
        with self._lock:
            total = self.totals.setdefault(key, Total())
            total.calls += 1
            total.payload_bytes += payload_bytes
            total.wire_bytes += wire_bytes
            total.between_bytes += between_bytes
            return total

    def start_clock(self, total: Total, at: float) -> None:
        """An operation started. Time in which several of one total are in flight counts once."""
        self._advance_clock(total, at, 1)

    def stop_clock(self, total: Total, at: float) -> None:
        """An operation ended."""
        self._advance_clock(total, at, -1)

    def _advance_clock(self, total: Total, at: float, change: int) -> None:
        with self._lock:
            if total.in_flight:
                total.seconds += max(0.0, at - total.clock_at)
            total.clock_at = max(at, total.clock_at)
            total.in_flight += change

    @property
    def wire_bytes(self) -> int:
        """All bytes sent so far."""
        with self._lock:
            return sum(total.wire_bytes for total in self.totals.values())

    def rows(self) -> list[dict[str, Any]]:
        """The totals as plain rows, for JSON."""
        with self._lock:
            return [{**key._asdict(), **asdict(total)} for key, total in sorted(self.totals.items())]

    def load_rows(self, rows: list[dict[str, Any]]) -> None:
        """Continue from rows saved earlier."""
        self.totals = {
            Key(**{name: row[name] for name in Key._fields if name in row}):  # earlier versions have no part
            Total(*(row[name] for name in Total.__annotations__))
            for row in rows
        }


# ---- totals of a run

LINKS = ("inside", "between")  # inside nodes, and between them
TRAINING = ("train", "sync")  # purposes of training; the others are start, eval and checkpoint
SentByPurpose = dict[str, dict[str, int]]  # purpose → link → bytes of all ranks


def bytes_of(sent: SentByPurpose, purposes: Collection[str] | None = None, links: Collection[str] = LINKS) -> int:
    """The bytes for some purposes, by default all of them, on some links.

    >>> bytes_of({"train": {"inside": 1, "between": 2}, "eval": {"inside": 4, "between": 8}}, TRAINING)
    3
    """
    return sum(sent[purpose][link] for purpose in sent if purposes is None or purpose in purposes for link in links)
