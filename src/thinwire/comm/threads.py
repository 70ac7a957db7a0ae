"""Ranks as threads of one process: the same laws in milliseconds, and any number of ranks on a laptop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.comm.base import Comm, Op, Work
from thinwire.comm.ledger import Ledger
from thinwire.comm.world import place
from thinwire.errors import PeerLost, RunError, UsageError

T = TypeVar("T")
Slot = tuple[Any, ...]
STUCK_SECONDS = 0.2  # without anything new, until a rank looks whether all of them wait
COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class _Wait(NamedTuple):
    """A rank that waits for what another one does."""

    rank: int
    other: int
    may_end: Callable[[], bool]


class Board:
    """Where the threads of one world leave things for each other.

    A rank waits for another one alone. Where all that have not ended do, none can go on, and all of them are told so.
    A rank that talks in several threads may wait in one of them, so then nothing is told.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.threads: set[int] = set()  # that have left something here, or waited
        self.waiting: dict[int, _Wait] = {}  # by thread
        self.stuck: dict[int, str] = {}  # by thread: who waited for whom, when nobody could go on
        self.changed = threading.Condition()
        self.posts: dict[Slot, Any] = {}
        self.taken: dict[Slot, int] = {}
        self.ended: dict[int, str] = {}  # rank → why it will post nothing more

    def post(self, slot: Slot, value: Any) -> None:
        with self.changed:
            self.threads.add(threading.get_ident())
            self.posts[slot] = value
            self.changed.notify_all()

    def take(self, slot: Slot, me: int, poster: int, readers: int) -> Any:
        """Wait for a rank's post; the last of its readers removes it."""
        with self.changed:
            self._wait(me, poster, lambda: slot in self.posts)
            value = self.posts[slot]
            self.taken[slot] = self.taken.get(slot, 0) + 1
            if self.taken[slot] == readers:
                del self.posts[slot], self.taken[slot]
                self.changed.notify_all()
            return value

    def until_taken(self, slot: Slot, me: int, reader: int) -> None:
        """Wait until a rank has taken a post."""
        with self.changed:
            self._wait(me, reader, lambda: slot not in self.posts)

    def _wait(self, me: int, other: int, is_there: Callable[[], bool]) -> None:
        """Wait for what another rank does; it may end instead, or wait for this one."""
        thread, wait = threading.get_ident(), _Wait(me, other, lambda: is_there() or other in self.ended)
        self.threads.add(thread)
        self.waiting[thread] = wait
        while not wait.may_end() and thread not in self.stuck:
            if not self.changed.wait(STUCK_SECONDS):
                self._look_for_stuck_ranks()
        del self.waiting[thread]
        stuck = self.stuck.pop(thread, "")
        if is_there():
            return
        if other in self.ended:
            raise PeerLost(f"lost contact with rank {other} ({self.ended[other]})")
        raise RunError(f"ranks wait for each other: {stuck}; every rank must make the same calls in the same order")

    def _look_for_stuck_ranks(self) -> None:
        waits = self.waiting.values()
        all_wait = len(waits) == self.num_ranks - len(self.ended) and len(self.threads) <= self.num_ranks
        if all_wait and not any(wait.may_end() for wait in waits):
            whom = sorted((wait.rank, wait.other) for wait in waits)
            self.stuck = dict.fromkeys(self.waiting, ", ".join(f"rank {rank} for rank {other}" for rank, other in whom))
            self.changed.notify_all()

    def has(self, slots: Sequence[Slot]) -> bool:
        with self.changed:
            return all(slot in self.posts for slot in slots)

    def end(self, rank: int, why: str) -> None:
        with self.changed:
            self.ended[rank] = why
            self.changed.notify_all()


class ThreadComm(Comm):
    """One rank of a world of threads. It books what gloo would send for the same operations."""

    backend = "gloo"

    def __init__(
        self, board: Board, members: Sequence[int], rank: int, link: str, ledger: Ledger, nodes: Sequence[int]
    ) -> None:
        self.board = board
        self.members = tuple(members)
        self.nodes = tuple(nodes)
        self.rank = rank
        self.size = len(self.members)
        self.link = link
        self.ledger = ledger
        self._calls = 0
        self._splits = 0
        self._messages: dict[tuple[int, int], int] = {}
        self._name: Slot = (link, self.members)

    def split(self, groups: Sequence[Sequence[int]], link: str) -> ThreadComm:
        own = self._group_of_mine(groups)
        self._splits += 1
        members, nodes = [self.members[r] for r in own], [self.nodes[r] for r in own]
        part = ThreadComm(self.board, members, own.index(self.rank), link, self.ledger, nodes)
        part._name = (*self._name, self._splits, link, part.members)
        return part

    def _exchange(self, value: Any) -> Callable[[], list[Any]]:
        """Leave a value for everyone; the returned function waits for all of them, in rank order."""
        self._calls += 1
        call = self._calls
        self.board.post((*self._name, call, self.rank), value)
        return lambda: [self._take((*self._name, call, r), r, self.size) for r in range(self.size)]

    def _take(self, slot: Slot, poster: int, readers: int) -> Any:
        return self.board.take(slot, self.members[self.rank], self.members[poster], readers)

    def _start_reduce(self, tensor: Tensor, op: Op) -> Work:
        collect = self._exchange(tensor.detach().clone())
        slots = [(*self._name, self._calls, r) for r in range(self.size)]
        return _Reduction(collect, op, lambda: self.board.has(slots))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = self._exchange(tensor.detach().clone())()
        if any(p.shape != tensor.shape for p in parts):
            raise UsageError(f"gather: shapes differ between ranks: {[tuple(p.shape) for p in parts]}; pad them first")
        return [p.to(tensor.device, copy=True) for p in parts]

    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        rows = self._exchange([p.detach().clone() for p in parts])()
        return [row[self.rank].reshape(want.shape).to(want.device) for row, want in zip(rows, like, strict=True)]

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        sent: Tensor = self._exchange(tensor.detach().clone() if self.rank == root else None)()[root]
        return sent.to(tensor.device, copy=True)

    def _isend(self, tensor: Tensor, to: int) -> Work:
        slot, sent = self._message(self.rank, to), tensor.detach().clone()
        self.board.post(slot, sent)
        return _Sending(
            sent,
            lambda: self.board.until_taken(slot, self.members[self.rank], self.members[to]),
            lambda: not self.board.has([slot]),
        )

    def _irecv(self, like: Tensor, source: int) -> Work:
        slot = self._message(source, self.rank)
        return _Receiving(
            lambda: self._take(slot, source, readers=1).reshape(like.shape).to(like.device),
            lambda: self.board.has([slot]),
        )

    def _message(self, source: int, to: int) -> Slot:
        """The slot of the next message on this pair; messages arrive in the order they were sent."""
        number = self._messages[source, to] = self._messages.get((source, to), 0) + 1
        return (*self._name, "message", source, to, number)


class _Sending(NamedTuple):
    """A message that has not been taken yet."""

    sent: Tensor
    until_taken: Callable[[], None]
    taken: Callable[[], bool]

    def wait(self) -> Tensor:
        self.until_taken()
        return self.sent

    def done(self) -> bool:
        return self.taken()


class _Receiving(NamedTuple):
    """A message that may not be there yet."""

    take: Callable[[], Tensor]
    there: Callable[[], bool]

    def wait(self) -> Tensor:
        return self.take()

    def done(self) -> bool:
        return self.there()


class _Reduction:
    """A reduction whose parts may not all be there yet. Parts are combined in rank order."""

    def __init__(self, collect: Callable[[], list[Tensor]], op: Op, ready: Callable[[], bool]) -> None:
        self.collect = collect
        self.op = op
        self.ready = ready
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            first, *rest = self.collect()
            if any(part.shape != first.shape or part.dtype != first.dtype for part in rest):
                given = [(tuple(part.shape), part.dtype) for part in (first, *rest)]
                raise UsageError(f"{self.op}: ranks gave different tensors: {given}")
            result = first.clone()
            for part in rest:
                result = COMBINE[self.op](result, part.to(first.device))
            self.result = result
        return self.result

    def done(self) -> bool:
        return self.result is not None or self.ready()


def simulate(function: Callable[[Comm], T], *, ranks: int, nodes: int = 1) -> list[T]:
    """Run `function(comm)` on n ranks as threads of this process; returns each rank's result, in rank order.

    With `nodes`, the ledger counts as if the ranks were spread over so many nodes.

    The ranks share torch's global random state: make models before, and copy them inside.

    >>> import thinwire, torch
    >>> thinwire.simulate(lambda comm: comm.sum(torch.tensor(comm.rank)).item(), ranks=4)
    [6, 6, 6, 6]
    """
    if ranks < 1:
        raise UsageError(f"simulate: ranks={ranks}; possible: 1 or more")
    placed = place(ranks, nodes)
    board = Board(ranks)
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadComm(board, range(ranks), rank, "world", Ledger(), placed))
            board.end(rank, "it has finished")
        except BaseException as error:
            errors[rank] = error
            board.end(rank, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(r,), name=f"rank-{r}", daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors.values(), key=lambda e: isinstance(e, PeerLost)):
        raise error
    return results
