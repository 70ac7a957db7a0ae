"""Ranks that record what they would send: a strategy runs as it is, and a trace of it can be replayed on any link."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.background import BackgroundWork
from thinwire.comm.base import Op, find_own_group
from thinwire.comm.dry import DryComm
from thinwire.comm.ledger import Ledger, Total
from thinwire.comm.process_groups import ProcessGroup
from thinwire.comm.trace import Channel, Trace
from thinwire.comm.turns import Turns
from thinwire.comm.wire_bytes import Sent
from thinwire.comm.work import Work
from thinwire.comm.world import place
from thinwire.errors import PeerLost

T = TypeVar("T")


class RecordingComm(DryComm):
    """One rank of a group. What it gives and gets has the right shape; messages between recorded ranks are real.

    Threads and lanes are those of processes. A task runs when it is first waited for, after those given before it.
    """

    is_async = True

    def __init__(self, rank: int, ranks: int, nodes: Sequence[int], trace: Trace, turns: Turns) -> None:
        self.rank, self.size, self.nodes, self.link = rank, ranks, tuple(nodes), "world"
        self.backend, self.is_simulated, self.ledger = "gloo", False, Ledger()
        self.members = list(range(ranks))  # their ranks in the world
        self.trace, self.turns = trace, turns
        self.channel = Channel(0, 0)
        self._lanes: list[RecordingComm] = [self]
        self._messages: dict[tuple[int, int], int] = {}  # by source and receiver
        self._blocks, self._source, self._num_broadcasts = False, -1, 0

    @property
    def lanes(self) -> Sequence[RecordingComm]:
        if len(self._lanes) == 1:
            self._lanes.append(self._like(self.members, self.link, self.channel._replace(lane=1)))
        return self._lanes

    def split(self, groups: Sequence[Sequence[int]], link: str) -> RecordingComm:
        own = find_own_group(groups, self.rank, self.size)
        self.trace.groups.append([[self.members[r] for r in group] for group in groups])
        return self._like([self.members[r] for r in own], link, Channel(len(self.trace.groups) - 1, 0))

    def _like(self, members: list[int], link: str, channel: Channel) -> RecordingComm:
        world_nodes = dict(zip(self.members, self.nodes, strict=True))
        other = RecordingComm(
            members.index(self.members[self.rank]), len(members), [world_nodes[m] for m in members], self.trace,
            self.turns,
        )  # fmt: skip
        other.members, other.link, other.channel, other.ledger = members, link, channel, self.ledger
        return other

    # ---- operations

    def book(self, op: str, payload: int, sent: Sent) -> Total:
        self.trace.add(
            "start", self.trace.num_operations, op=op, channel=self.channel, payload=payload, sent=sent,
            source=self._source, purpose=self.ledger.current_purpose,
        )  # fmt: skip
        self.trace.num_operations += 1
        self._source = -1
        return super().book(op, payload, sent)

    def _booked(self, op: str, payload: int, sent: Sent, run: Callable[[], T]) -> T:
        self.book(op, payload, sent)
        number, self._blocks = self.trace.num_operations - 1, True
        self.trace.add("wait", number)
        try:
            return run()
        finally:
            self._blocks = False

    def _start_reduce(self, tensor: Tensor, op: Op, device: torch.device, overwrite: bool = False) -> Work:
        return self._work(lambda: tensor.detach().clone())

    def _broadcast(self, tensor: Tensor, root: int, device: torch.device) -> Tensor:
        """The root's tensor, if the root is recorded and has reached this; it runs before the others where it can."""
        recorded = [m for m in self.members if m in self.turns.ranks]
        source, me = self.members[root], self.members[self.rank]
        self._num_broadcasts += 1
        slot = (self.channel, tuple(self.members), self._num_broadcasts)
        if source not in recorded or len(recorded) == 1:
            return tensor.detach().clone()
        if me == source:
            self.turns.board.post(slot, tensor.detach().clone())
            return tensor.detach().clone()
        with self.turns.resting(self.trace):
            sent: Tensor = self.turns.board.read(slot, me, source, readers=len(recorded) - 1)
        return sent.clone()

    def _isend(self, tensor: Tensor, to: int, device: torch.device) -> Work:
        me, other = self.members[self.rank], self.members[to]
        if {me, other} <= self.turns.ranks:
            self.turns.board.post(self._slot(me, other), tensor.detach().clone())
        return self._work(lambda: tensor)

    def _irecv(self, like: Tensor, source: int) -> Work:
        me, other = self.members[self.rank], self.members[source]
        self._source = source
        slot = self._slot(other, me)

        def receive() -> Tensor:
            if other not in self.turns.ranks:
                return torch.zeros_like(like)
            with self.turns.resting(self.trace):
                message: Tensor = self.turns.board.read(slot, me, other, readers=1)
            return message.reshape(like.shape)

        return self._work(receive)

    def _slot(self, source: int, to: int) -> tuple[Any, ...]:
        number = self._messages[source, to] = self._messages.get((source, to), 0) + 1
        return (self.channel, source, to, number)

    def _work(self, finish: Callable[[], Tensor]) -> Work:
        """The handle of the operation that is booked next; of the one that was booked last if it is a blocking one."""
        return RecordedWork(self.trace, None if self._blocks else self.trace.num_operations, finish)

    # ---- tasks

    def in_background(self, work: Callable[[], T], device: torch.device) -> RecordedTask[T]:
        task = RecordedTask(self, self.trace.submit(self.channel), work)
        self.turns.unfinished.setdefault((self.trace, self.channel), []).append(task)
        return task


class RecordedWork:
    """A started operation; number None if it is waited for already."""

    def __init__(self, trace: Trace, number: int | None, finish: Callable[[], Tensor]) -> None:
        self.trace, self.number, self.finish = trace, number, finish

    def wait(self) -> Tensor:
        if self.number is not None:
            self.trace.add("wait", self.number)
        return self.finish()

    def done(self) -> bool:
        return True


class RecordedTask(BackgroundWork[T]):
    """A function for the communication thread of a group."""

    def __init__(self, comm: RecordingComm, number: int, work: Callable[[], T]) -> None:
        super().__init__(comm.ledger)
        self.comm, self.number, self.work = comm, number, work
        self.purpose = comm.ledger.current_purpose

    def wait(self) -> T:
        self.comm.trace.add("join", self.number)
        while not self.future.done():
            self.comm.turns.unfinished[self.comm.trace, self.comm.channel].pop(0).run_now()
        return self.future.result()

    def run_now(self) -> None:
        """Run the function, as its thread would."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as communication threads have
        try:
            with self.comm.trace.running(self.number), self.ledger.purpose(self.purpose):
                self.run(self.work)
        finally:
            torch.set_num_threads(threads)


def record(
    function: Callable[[RecordingComm], T], *, ranks: int, nodes: int | Sequence[int] = 1,
    of: Sequence[int] | None = None, is_timed: bool = False, group: ProcessGroup | None = None,
) -> dict[int, tuple[Trace, Ledger, T]]:  # fmt: skip
    """Run `function(comm)` on some ranks of a world that does not exist; returns the trace and ledger of each.

    `of` names the ranks to record, by default all. With `is_timed`, traces have the seconds that each rank computed;
    `group`, a process group of this process alone, lets exchanges of gradients use a real DDP.

    >>> recorded = record(lambda comm: comm.sum(torch.zeros(4)), ranks=1024, of=[0])
    >>> recorded[0][1].wire_bytes
    32
    """
    placed = place(ranks, nodes) if isinstance(nodes, int) else nodes
    chosen = list(range(ranks)) if of is None else list(of)
    turns = Turns(chosen, group)
    results: dict[int, tuple[Trace, Ledger, T]] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        with turns.turn:
            trace = Trace(ranks, is_timed)
            comm = RecordingComm(rank, ranks, placed, trace, turns)
            try:
                result = function(comm)
                turns.finish(trace)
                results[rank] = trace, comm.ledger, result
                turns.board.end(rank, "it has finished")
            except BaseException as error:
                errors[rank] = error
                turns.board.end(rank, f"{type(error).__name__}: {error}")

    if len(chosen) == 1:
        run(chosen[0])
    else:
        _on_threads(run, chosen)
    for error in sorted(errors.values(), key=lambda e: isinstance(e, PeerLost)):
        raise error
    return dict(sorted(results.items()))


def _on_threads(run: Callable[[int], None], ranks: Sequence[int]) -> None:
    threads = [threading.Thread(target=run, args=(rank,), name=f"recorded-{rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
