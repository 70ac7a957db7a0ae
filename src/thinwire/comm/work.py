"""Work: handles of operations that were started and may not have finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from thinwire.comm.wire_bytes import Sent

if TYPE_CHECKING:
    from thinwire.comm.base import Comm


class Work(Protocol):
    """A started operation. `wait` returns its result; `done` never blocks."""

    def wait(self) -> Tensor: ...
    def done(self) -> bool: ...


class BookedWork:
    """Books the bytes of an operation when it starts, and its time when it is waited for. Waits for it only once."""

    def __init__(
        self, comm: Comm, op: str, payload: int, sent: Sent, start: Callable[[], Work], peer: int | None = None
    ) -> None:
        self.comm, self.op, self.sent = comm, op, sent
        self.begin = time.perf_counter()
        self.begun = comm.begin(op, peer)
        with comm.inside(self.begun):
            self.work = start()
        self.total = comm.book(op, payload, sent)
        comm.ledger.start_clock(self.total, self.begin)
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            waiting_since = time.perf_counter()
            with self.comm.inside(self.begun):
                self.result = self.work.wait()
            end = time.perf_counter()
            self.comm.ledger.stop_clock(self.total, end)
            add_to_timeline(self.comm, self.op, self.sent, self.begin, waiting_since, end)
        return self.result

    def done(self) -> bool:
        return self.result is not None or self.work.done()


class MappedWork(NamedTuple):
    """An operation whose result is passed through a function."""

    work: Work
    function: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        return self.function(self.work.wait())

    def done(self) -> bool:
        return self.work.done()


class FinishedWork(NamedTuple):
    """An operation whose result is known already."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result

    def done(self) -> bool:
        return True


def add_to_timeline(comm: Comm, op: str, sent: Sent, begin: float, waiting_since: float, end: float) -> None:
    """Add an operation and the wait for it to the timeline. With one rank it is a copy: nobody waits for a network."""
    if comm.size > 1:
        comm.ledger.timeline.add_operation(op, begin, end, sum(sent.values()))
        comm.ledger.timeline.add_waiting(waiting_since, end)
