"""The ledger: every operation's payload and wire bytes, by link, operation, group size and purpose."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from thinwire.comm.timeline import Timeline

Purpose = Literal["train", "sync", "eval", "checkpoint", "start"]


class Key(NamedTuple):
    """What the totals are kept by."""

    purpose: Purpose
    link: str
    op: str
    ranks: int


@dataclass
class Total:
    """Sums over all operations of one key."""

    calls: int = 0
    payload_bytes: int = 0  # size of the tensors handed over
    wire_bytes: int = 0  # what this rank put on the link for them
    between_bytes: int = 0  # the part of wire_bytes that left the node
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.under_way, self.looked_at = 0, 0.0  # operations that were begun, and when one last began or ended


class Ledger:
    """Counts what one rank sends, and (in `timeline`) how long it waited for that.

    >>> ledger = Ledger()
    >>> with ledger.purpose("eval"):
    ...     line = ledger.book("world", "all_reduce", ranks=4, payload_bytes=400, wire_bytes=600, between_bytes=600)
    >>> ledger.wire_bytes, ledger.rows()[0]["purpose"]
    (600, 'eval')
    """

    def __init__(self) -> None:
        self.totals: dict[Key, Total] = {}
        self.timeline = Timeline()
        self._lock = threading.Lock()
        self._purpose = threading.local()  # each thread says for itself what it is doing

    @contextmanager
    def purpose(self, purpose: Purpose, instead_of: Purpose | None = None) -> Iterator[None]:
        """Book what this thread sends inside the block under a purpose; outside of any block it is "train".

        With `instead_of`, only where it would else be booked under that one: a caller's own purpose stays.
        """
        before = self.current_purpose
        self._purpose.now = purpose if instead_of in (None, before) else before
        try:
            yield
        finally:
            self._purpose.now = before

    @property
    def current_purpose(self) -> Purpose:
        """What this thread is doing."""
        purpose: Purpose = getattr(self._purpose, "now", "train")
        return purpose

    def book(
        self, link: str, op: str, *, ranks: int, payload_bytes: int, wire_bytes: int, between_bytes: int,
        seconds: float = 0.0,
    ) -> Total:  # fmt: skip
        """Add one operation; returns the line that it is in, for `began` and `ended`."""
        key = Key(self.current_purpose, link, op, ranks)
        with self._lock:
            total = self.totals.setdefault(key, Total())
            total.calls += 1
            total.payload_bytes += payload_bytes
            total.wire_bytes += wire_bytes
            total.between_bytes += between_bytes
            total.seconds += seconds
            return total

    def began(self, line: Total, at: float) -> None:
        """An operation of a line is under way from now on; time in which several are counts once."""
        self._pass_time(line, at, 1)

    def ended(self, line: Total, at: float) -> None:
        """One of them is over."""
        self._pass_time(line, at, -1)

    def _pass_time(self, line: Total, at: float, change: int) -> None:
        with self._lock:
            if line.under_way:
                line.seconds += max(0.0, at - line.looked_at)
            line.looked_at = max(at, line.looked_at)
            line.under_way += change

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
            Key(*(row[name] for name in Key._fields)): Total(*(row[name] for name in Total.__annotations__))
            for row in rows
        }


Sent = dict[int, int]  # to which rank of the group, how many bytes


def all_reduce_bytes(payload: int, ranks: int) -> int:
    """A ring: 2(n−1)/n of the payload, in n−1 steps of summing and n−1 of handing round."""
    return round(2 * (ranks - 1) / ranks * payload)


def all_gather_bytes(payload: int, ranks: int) -> int:
    """A ring: each rank passes on n−1 parts of the size of its own."""
    return (ranks - 1) * payload


def round_the_ring(num_bytes: int, ranks: int, rank: int) -> Sent:
    """All of it to the next rank."""
    return {(rank + 1) % ranks: num_bytes} if ranks > 1 else {}


def broadcast(payload: int, ranks: int, rank: int, root: int, backend: str) -> Sent:
    """gloo: a binomial tree, the root sends ⌈log₂ n⌉ copies; nccl: a chain, all but the last send one."""
    place = (rank - root) % ranks
    if backend == "nccl":
        next_places = [place + 1] if place < ranks - 1 else []
    else:
        rounds = (ranks - 1).bit_length()
        next_places = [place + 2**i for i in range(rounds) if place < 2**i and place + 2**i < ranks]
    return {(root + next_place) % ranks: payload for next_place in next_places}


# ---- totals of a run

LINKS = ("inside", "between")  # nodes
TRAINING = ("train", "sync")  # purposes of the ledger; the others are start, eval and checkpoint
SentByPurpose = dict[str, dict[str, int]]  # bytes of all ranks by purpose, then inside and between nodes


def bytes_of(sent: SentByPurpose, purposes: Collection[str] | None = None, links: Collection[str] = LINKS) -> int:
    """The bytes for some purposes, by default all of them, on some links.

    >>> bytes_of({"train": {"inside": 1, "between": 2}, "eval": {"inside": 4, "between": 8}}, TRAINING)
    3
    """
    return sum(sent[purpose][link] for purpose in sent if purposes is None or purpose in purposes for link in links)
