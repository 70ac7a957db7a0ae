"""Ranks as threads of one process: the operations of a Comm in milliseconds, with any number of ranks on a laptop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.comm.base import Comm, Op, find_own_group
from thinwire.comm.board import Board, Slot
from thinwire.comm.ledger import Ledger
from thinwire.comm.work import Work
from thinwire.comm.world import place
from thinwire.errors import PeerLost, UsageError

T = TypeVar("T")
COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class ThreadComm(Comm):
    """One rank of a world of threads. It books what gloo would send for the same operations."""

    backend = "gloo"
    is_simulated = True

    def __init__(
        self, board: Board, members: Sequence[int], rank: int, link: str, ledger: Ledger, nodes: Sequence[int]
    ) -> None:
        self.board = board
        self.members = tuple(members)  # their ranks in the world
        self.nodes = tuple(nodes)
        self.rank = rank
        self.size = len(self.members)
        self.link = link
        self.ledger = ledger
        self._num_calls = 0
        self._num_splits = 0
        self._num_messages: dict[tuple[int, int], int] = {}  # by source and receiver
        self._name: Slot = (link, self.members)

    def split(self, groups: Sequence[Sequence[int]], link: str) -> ThreadComm:
        own = find_own_group(groups, self.rank, self.size)
        self._num_splits += 1
        members, nodes = [self.members[r] for r in own], [self.nodes[r] for r in own]
        subgroup = ThreadComm(self.board, members, own.index(self.rank), link, self.ledger, nodes)
        subgroup._name = (*self._name, self._num_splits, link, subgroup.members)
        return subgroup

    def _start_reduce(self, tensor: Tensor, op: Op, device: torch.device, overwrite: bool = False) -> Work:
        slots = self._post(tensor.detach().clone())
        return _ThreadWork(lambda: _combined(self._read(slots), op), lambda: self.board.has(slots))

    def _all_gather(self, tensor: Tensor, device: torch.device) -> list[Tensor]:
        parts = self._exchange(tensor.detach().clone())
        if any(p.shape != tensor.shape for p in parts):
            raise UsageError(
                f"all_gather: shapes differ between ranks: {[tuple(p.shape) for p in parts]}; pad them first"
            )
        return [p.to(device, copy=True) for p in parts]

    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        rows = self._exchange([p.detach().clone() for p in parts])
        return [row[self.rank].reshape(want.shape).to(want.device) for row, want in zip(rows, like, strict=True)]

    def _broadcast(self, tensor: Tensor, root: int, device: torch.device) -> Tensor:
        sent: Tensor = self._exchange(tensor.detach().clone() if self.rank == root else None)[root]
        return sent.to(device, copy=True)

    def _isend(self, tensor: Tensor, to: int, device: torch.device) -> Work:
        slot, sent = self._message_slot(self.rank, to), tensor.detach().clone()
        self.board.post(slot, sent)

        def wait() -> Tensor:
            self.board.wait_until_read(slot, self.members[self.rank], self.members[to])
            return sent

        return _ThreadWork(wait, lambda: not self.board.has([slot]))

    def _irecv(self, like: Tensor, source: int) -> Work:
        slot = self._message_slot(source, self.rank)
        me, poster = self.members[self.rank], self.members[source]
        return _ThreadWork(
            lambda: self.board.read(slot, me, poster, readers=1).reshape(like.shape).to(like.device),
            lambda: self.board.has([slot]),
        )

    def _exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return self._read(self._post(value))

    def _post(self, value: Any) -> list[Slot]:
        """Post a value for every rank of the group; returns the slots of all ranks for this call."""
        self._num_calls += 1
        slots: list[Slot] = [(*self._name, self._num_calls, rank) for rank in range(self.size)]
        self.board.post(slots[self.rank], value)
        return slots

    def _read(self, slots: Sequence[Slot]) -> list[Any]:
        me = self.members[self.rank]
        return [self.board.read(slot, me, poster, self.size) for slot, poster in zip(slots, self.members, strict=True)]

    def _message_slot(self, source: int, to: int) -> Slot:
        """The slot of the next message from one rank to another; messages arrive in the order they were sent."""
        number = self._num_messages[source, to] = self._num_messages.get((source, to), 0) + 1
        return (*self._name, "message", source, to, number)


class _ThreadWork(NamedTuple):
    """An operation that waits for other threads; its `wait` is called once."""

    finish: Callable[[], Tensor]
    is_done: Callable[[], bool]

    def wait(self) -> Tensor:
        return self.finish()

    def done(self) -> bool:
        return self.is_done()


def _combined(parts: Sequence[Tensor], op: Op) -> Tensor:
    """The sum, maximum or minimum of every rank's tensor, in rank order."""
    first, *rest = parts
    if any(part.shape != first.shape or part.dtype != first.dtype for part in rest):
        given = [(tuple(part.shape), part.dtype) for part in parts]
        raise UsageError(f"{op}: ranks gave different tensors: {given}; give the same shape and dtype on every rank")
    result = first.clone()
    for part in rest:
        result = COMBINE[op](result, part.to(first.device))
    return result


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
