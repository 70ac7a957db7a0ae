"""Comm: the operations of a group of ranks, booked the same way over processes and over threads."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeVar

import torch
from torch import Tensor

from thinwire.comm.background import BackgroundWork
from thinwire.comm.ledger import Ledger, Total
from thinwire.comm.whereabouts import Operation
from thinwire.comm.wire_bytes import Sent, all_gather_sends, all_reduce_sends, broadcast_sends
from thinwire.comm.work import BookedWork, MappedWork, Work, add_to_timeline
from thinwire.common.dtypes import as_reals, is_averaged
from thinwire.common.tensors import num_bytes
from thinwire.errors import UsageError

T = TypeVar("T")
Op = Literal["sum", "max", "min"]


class Comm(ABC):
    """A group of ranks. Every operation is collective over the group except send and recv.

    Inputs are not changed, unless the caller allows it, and results are new tensors on the input's device. Every
    operation works at size 1, so callers need no special case for one rank. Subclasses move bytes; this class books
    them.
    """

    rank: int
    size: int
    link: str  # the ledger has separate totals for each link
    backend: str
    ledger: Ledger
    is_async = False  # whether `in_background` returns before the work is done
    is_simulated = False  # whether ranks are threads of one process
    is_dry = False  # whether other ranks do not exist: what they give has the right shape, and no meaning
    nodes: tuple[int, ...]  # the node that each rank of the group is on

    # ---- reductions: every rank gives the same shape and dtype, and gets bitwise the same result

    def sum(self, tensor: Tensor) -> Tensor:
        """Σ over ranks."""
        return self._all_reduce(tensor, "sum")

    def max(self, tensor: Tensor) -> Tensor:
        """Largest over ranks, element by element."""
        return self._all_reduce(tensor, "max")

    def min(self, tensor: Tensor) -> Tensor:
        """Smallest over ranks, element by element."""
        return self._all_reduce(tensor, "min")

    def mean(self, tensor: Tensor, overwrite: bool = False) -> Tensor:
        """(1/n)·Σ over ranks; for floating-point and complex tensors.

        float16 is divided by a power of two before the sum: where the mean is at most 65504, the sum cannot overflow.
        Other dtypes are divided after the sum. With `overwrite`, the result may be in the memory of the tensor, which
        saves a copy.

        >>> import thinwire, torch
        >>> thinwire.simulate(lambda comm: comm.mean(torch.tensor([1.0 * comm.rank])).item(), ranks=3)
        [1.0, 1.0, 1.0]
        """
        return self.start_mean(tensor, overwrite).wait()

    def start_mean(self, tensor: Tensor, overwrite: bool = False) -> Work:
        """Start a mean and return at once.

        Unless `overwrite` gives the tensor away, it may change afterwards: its present values are averaged.
        """
        if not is_averaged(tensor):
            raise UsageError(f"mean of a {tensor.dtype} tensor; possible for floating-point tensors; try sum")
        if tensor.is_complex():
            return MappedWork(self.start_mean(as_reals(tensor).contiguous()), torch.view_as_complex)
        payload = num_bytes(tensor)
        divided_by = 2 ** (self.size - 1).bit_length() if tensor.dtype == torch.float16 else 1
        given = self._stage(tensor / divided_by if divided_by > 1 else tensor)
        return BookedWork(
            self, "all_reduce", payload, all_reduce_sends(payload, self.size, self.rank),
            lambda: MappedWork(
                self._start_reduce(given, "sum", tensor.device, overwrite),
                lambda total: total.div_(self.size / divided_by),
            ),
        )  # fmt: skip

    # ---- movement: any dtype, bytes are unchanged

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order, on every rank; shapes must be equal."""
        payload = num_bytes(tensor)
        sent = all_gather_sends(payload, self.size, self.rank)
        given = self._stage(tensor)
        return self._booked("all_gather", payload, sent, lambda: self._all_gather(given, tensor.device))

    def all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Send parts[j] to rank j; returns what each rank sent here, shaped as `like` (default: as parts)."""
        if len(parts) != self.size:
            raise UsageError(f"all_to_all: {len(parts)} parts given for {self.size} ranks; give one for each rank")
        payload = sum(map(num_bytes, parts))
        sent = {to: num_bytes(part) for to, part in enumerate(parts) if to != self.rank}
        given = self._stage_parts(parts)
        return self._booked("all_to_all", payload, sent, lambda: self._all_to_all(given, like or parts))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor on every rank; the others give one of the same shape."""
        payload = num_bytes(tensor)
        sent = broadcast_sends(payload, self.size, self.rank, root, self.backend)
        given = self._stage(tensor)
        return self._booked("broadcast", payload, sent, lambda: self._broadcast(given, root, tensor.device))

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to one rank, which must call recv. Returns once it has, so two ranks must not both send first."""
        self.isend(tensor, to).wait()

    def isend(self, tensor: Tensor, to: int) -> Work:
        """Start to send and return at once. The tensor may change afterwards: its present values are sent."""
        given = self._stage(tensor)
        return BookedWork(
            self, "send", num_bytes(tensor), {to: num_bytes(tensor)},
            lambda: self._isend(given, to, tensor.device), peer=to,
        )  # fmt: skip

    def recv(self, like: Tensor, source: int) -> Tensor:
        """Receive the next tensor that `source` sends; its shape and dtype must be those of `like`."""
        return self.irecv(like, source).wait()

    def irecv(self, like: Tensor, source: int) -> Work:
        """Start to receive the next tensor that `source` sends, and return at once."""
        return BookedWork(self, "recv", num_bytes(like), {}, lambda: self._irecv(like, source), peer=source)

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.sum(torch.zeros(1))

    # ---- groups and threads

    @property
    def lanes(self) -> Sequence[Comm]:
        """Groups of the same ranks, this one first, whose operations do not wait for each other.

        Simulated ranks have this group alone.
        """
        return [self]

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]], link: str) -> Comm:
        """A Comm of the group that this rank is in. Every rank calls it with the same groups."""

    def in_background(self, work: Callable[[], T], device: torch.device) -> BackgroundWork[T]:
        """Start a function that uses this group and tensors of a device, and return at once.

        Until it is done nothing else may use the group, and its tensors must not change. Simulated ranks run it at
        once, and return when it is done.
        """
        background: BackgroundWork[T] = BackgroundWork(self.ledger)
        background.run(work)
        return background

    def note(self, doing: str) -> None:  # noqa: B027
        """Tell other ranks what this one does from now on, which they show if it is late."""

    def begin(self, op: str, peer: int | None = None) -> Operation | None:
        """This rank begins an operation, or with `peer` a message to or from one rank."""
        return None

    def inside(self, begun: Operation | None) -> AbstractContextManager[None]:
        """Inside, this thread is in an operation that it has begun, and may wait for other ranks."""
        return nullcontext()

    def be_patient(self, seconds: float) -> None:  # noqa: B027
        """Wait for other ranks at least so long from now on, also in groups that are split off later."""

    def close(self) -> None:  # noqa: B027
        """Release the threads and connections of this group."""

    @property
    def subgroups(self) -> list[Comm]:
        """The groups that were split from this one and hold connections; those of simulated ranks hold none."""
        return []

    def close_subgroups(self, groups: Sequence[Comm] | None = None) -> None:  # noqa: B027
        """Close some of the groups that were split from this one, by default all."""

    # ---- what a backend provides: operations on staged tensors, whose results are on the device that is given

    def _stage(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy where the backend can send it from. Waits for a GPU: that is no time on the network."""
        return tensor

    def _stage_parts(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same for several tensors."""
        return parts

    @abstractmethod
    def _start_reduce(self, tensor: Tensor, op: Op, device: torch.device, overwrite: bool = False) -> Work: ...
    @abstractmethod
    def _all_gather(self, tensor: Tensor, device: torch.device) -> list[Tensor]: ...
    @abstractmethod
    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]: ...
    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int, device: torch.device) -> Tensor: ...
    @abstractmethod
    def _isend(self, tensor: Tensor, to: int, device: torch.device) -> Work: ...
    @abstractmethod
    def _irecv(self, like: Tensor, source: int) -> Work: ...

    # ---- booking

    def book(self, op: str, payload: int, sent: Sent) -> Total:
        """Enter an operation of this group in the ledger. Callers outside enter what torch sends for them."""
        between = sum(count for to, count in sent.items() if self.nodes[to] != self.nodes[self.rank])
        return self.ledger.book(
            self.link, op, ranks=self.size, payload_bytes=payload, wire_bytes=sum(sent.values()), between_bytes=between
        )  # fmt: skip

    def _all_reduce(self, tensor: Tensor, op: Op) -> Tensor:
        if tensor.is_complex():
            if op != "sum":
                raise UsageError(f"{op} of a {tensor.dtype} tensor; complex numbers have no order; possible: real ones")
            return torch.view_as_complex(self._all_reduce(as_reals(tensor).contiguous(), op))
        payload = num_bytes(tensor)
        sent = all_reduce_sends(payload, self.size, self.rank)
        given = self._stage(tensor)
        return self._booked("all_reduce", payload, sent, lambda: self._start_reduce(given, op, tensor.device).wait())

    def _booked(self, op: str, payload: int, sent: Sent, run: Callable[[], T]) -> T:
        """Run an operation to its end and enter it in ledger and timeline."""
        begin = time.perf_counter()
        total = self.book(op, payload, sent)
        self.ledger.start_clock(total, begin)
        try:
            with self.inside(self.begin(op)):
                return run()
        finally:
            end = time.perf_counter()
            self.ledger.stop_clock(total, end)
            add_to_timeline(self, op, sent, begin, begin, end)


def find_own_group(groups: Sequence[Sequence[int]], rank: int, size: int) -> list[int]:
    """The group that a rank is in, sorted; UsageError if the groups do not hold each rank once."""
    if sorted(r for g in groups for r in g) != list(range(size)):
        raise UsageError(f"split: {list(map(list, groups))} does not hold each of {size} ranks once")
    return next(sorted(g) for g in groups if rank in g)
