"""Comm: how ranks talk. One set of operations, booked the same way, over processes or threads."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from thinwire.comm import ledger as formulas
from thinwire.comm.background import BackgroundWork
from thinwire.comm.ledger import Ledger, Sent, Total
from thinwire.common.dtypes import as_reals, is_averaged
from thinwire.common.tensors import num_bytes
from thinwire.errors import UsageError

T = TypeVar("T")
Op = Literal["sum", "max", "min"]


class Work(Protocol):
    """An operation under way. `wait` gives its result; `done` never blocks."""

    def wait(self) -> Tensor: ...
    def done(self) -> bool: ...


class Comm(ABC):
    """A group of ranks on one link. Every operation is collective over the group except send and recv.

    Inputs are never changed and results are fresh tensors on the input's device. Every operation works at
    size 1, so callers need no special case for one rank. Subclasses move bytes; this class books them.
    """

    rank: int
    size: int
    link: str
    backend: str
    ledger: Ledger
    is_async = False  # whether `in_background` returns before the work is done
    nodes: tuple[int, ...]  # the node that each rank of the group is on

    # ---- arithmetic: the same shape and dtype on every rank, bitwise the same result on every rank

    def sum(self, tensor: Tensor) -> Tensor:
        """Σ over ranks."""
        return self._all_reduced(tensor, "sum")

    def max(self, tensor: Tensor) -> Tensor:
        """Largest over ranks, element by element."""
        return self._all_reduced(tensor, "max")

    def min(self, tensor: Tensor) -> Tensor:
        """Smallest over ranks, element by element."""
        return self._all_reduced(tensor, "min")

    def mean(self, tensor: Tensor) -> Tensor:
        """(1/n)·Σ over ranks; for floating-point and complex tensors.

        Numbers of float16 are made smaller before the sum, by a power of two: where the mean is no more than 65504, the
        sum of what was made smaller is not, either. Others are divided afterwards.

        >>> import thinwire, torch
        >>> thinwire.simulate(lambda comm: comm.mean(torch.tensor([1.0 * comm.rank])).item(), ranks=3)
        [1.0, 1.0, 1.0]
        """
        return self.start_mean(tensor).wait()

    def start_mean(self, tensor: Tensor) -> Work:
        """Begin a mean and return at once; the tensor may change afterwards, the result is of now."""
        if not is_averaged(tensor):
            raise UsageError(f"mean of a {tensor.dtype} tensor; possible for floating-point tensors; try sum")
        if tensor.is_complex():
            return _Complex(self.start_mean(as_reals(tensor).contiguous()))
        payload, sent = num_bytes(tensor), self.all_reduce_sends(num_bytes(tensor))
        smaller = 2 ** (self.size - 1).bit_length() if tensor.dtype == torch.float16 else 1
        given = tensor / smaller if smaller > 1 else tensor
        self._await_gpu(given)
        return _Begun(
            self, "all_reduce", payload, sent, lambda: _Mean(self._start_reduce(given, "sum"), self.size / smaller)
        )

    # ---- movement: any dtype, bytes go unchanged

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order, on every rank; shapes must be equal."""
        payload = num_bytes(tensor)
        sent = formulas.round_the_ring(formulas.all_gather_bytes(payload, self.size), self.size, self.rank)
        return self._booked("all_gather", payload, sent, tensor, lambda: self._all_gather(tensor))

    def all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Send parts[j] to rank j; returns what each rank sent here, shaped as `like` (default: as parts)."""
        if len(parts) != self.size:
            raise UsageError(f"all_to_all: {len(parts)} parts given for {self.size} ranks; give one for each rank")
        payload = sum(map(num_bytes, parts))
        sent = {to: num_bytes(part) for to, part in enumerate(parts) if to != self.rank}
        return self._booked("all_to_all", payload, sent, parts[0], lambda: self._all_to_all(parts, like or parts))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor on every rank; the others give one of the same shape."""
        payload = num_bytes(tensor)
        sent = formulas.broadcast(payload, self.size, self.rank, root, self.backend)
        return self._booked("broadcast", payload, sent, tensor, lambda: self._broadcast(tensor, root))

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to one rank, which must call recv; returns once it has, so two ranks must not both send first."""
        self.isend(tensor, to).wait()

    def isend(self, tensor: Tensor, to: int) -> Work:
        """Begin to send and return at once; the tensor may change afterwards, what is sent is of now."""
        self._await_gpu(tensor)
        return _Begun(self, "send", num_bytes(tensor), {to: num_bytes(tensor)}, lambda: self._isend(tensor, to))

    def recv(self, like: Tensor, source: int) -> Tensor:
        """Receive what `source` sends, in the order it was sent: a tensor shaped like the one given."""
        return self.irecv(like, source).wait()

    def irecv(self, like: Tensor, source: int) -> Work:
        """Make room for what `source` will send, and return at once."""
        return _Begun(self, "recv", num_bytes(like), {}, lambda: self._irecv(like, source))

    def barrier(self) -> None:
        """Return once every rank is here."""
        self.sum(torch.zeros(1))

    def in_background(self, work: Callable[[], T], device: torch.device) -> BackgroundWork[T]:
        """Begin something that uses this group and tensors of a device, and return at once.

        Until it is done nothing else may use the group, and its tensors must not change. Simulated ranks do it now.
        """
        background: BackgroundWork[T] = BackgroundWork(self.ledger)
        background.run(work)
        return background

    def close(self) -> None:  # noqa: B027
        """Give back what this group holds: threads, connections."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]], link: str) -> Comm:
        """The group that this rank is in, as a Comm of its own; every rank calls it with the same groups."""

    # ---- what a backend provides

    @abstractmethod
    def _start_reduce(self, tensor: Tensor, op: Op) -> Work: ...
    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]: ...
    @abstractmethod
    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]: ...
    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> Tensor: ...
    @abstractmethod
    def _isend(self, tensor: Tensor, to: int) -> Work: ...
    @abstractmethod
    def _irecv(self, like: Tensor, source: int) -> Work: ...

    def _all_reduced(self, tensor: Tensor, op: Op) -> Tensor:
        if tensor.is_complex():
            if op != "sum":
                raise UsageError(f"{op} of a {tensor.dtype} tensor; complex numbers have no order; possible: real ones")
            return torch.view_as_complex(self._all_reduced(as_reals(tensor).contiguous(), op))
        sent = self.all_reduce_sends(num_bytes(tensor))
        return self._booked(
            "all_reduce", num_bytes(tensor), sent, tensor, lambda: self._start_reduce(tensor, op).wait()
        )

    def all_reduce_sends(self, payload: int) -> Sent:
        """What this rank sends in an all-reduce of so many bytes."""
        return formulas.round_the_ring(formulas.all_reduce_bytes(payload, self.size), self.size, self.rank)

    def _booked(self, op: str, payload: int, sent: Sent, tensor: Tensor, run: Callable[[], T]) -> T:
        self._await_gpu(tensor)
        begin = time.perf_counter()
        result = run()
        end = time.perf_counter()
        self.book(op, payload, sent, end - begin)
        self._tell(op, begin, begin, end, sent)
        return result

    def _tell(self, op: str, begin: float, waited_from: float, end: float, sent: Sent) -> None:
        """Enter an operation in the timeline; with nobody to talk to it is a copy, and no waiting."""
        if self.size > 1:
            self.ledger.timeline.communicated(op, begin, end, sum(sent.values()))
            self.ledger.timeline.waited(waited_from, end)

    def _await_gpu(self, tensor: Tensor) -> None:
        """Let a GPU finish what it computes before the clock starts: that is no time spent on the network."""
        if tensor.is_cuda and self.backend == "gloo":  # which would wait for it anyway
            torch.cuda.current_stream(tensor.device).synchronize()

    def book(self, op: str, payload: int, sent: Sent, seconds: float = 0.0) -> Total:
        """Enter an operation of this group in the ledger; for traffic that others cause on our behalf."""
        between = sum(count for to, count in sent.items() if self.nodes[to] != self.nodes[self.rank])
        return self.ledger.book(
            self.link, op, ranks=self.size, payload_bytes=payload, wire_bytes=sum(sent.values()), between_bytes=between,
            seconds=seconds,
        )  # fmt: skip

    def _group_of_mine(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Check a partition of the ranks; returns the group that this rank is in."""
        if sorted(r for g in groups for r in g) != list(range(self.size)):
            raise UsageError(f"split: {list(map(list, groups))} does not hold each of {self.size} ranks once")
        return next(sorted(g) for g in groups if self.rank in g)


class _Begun:
    """An operation under way; its bytes are booked when it begins, its time when it is waited for."""

    def __init__(self, comm: Comm, op: str, payload: int, sent: Sent, start: Callable[[], Work]) -> None:
        self.comm, self.op, self.sent = comm, op, sent
        self.begin = time.perf_counter()
        self.pending = start()
        self.line = comm.book(op, payload, sent)
        comm.ledger.began(self.line, self.begin)
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            waited_from = time.perf_counter()
            self.result = self.pending.wait()
            end = time.perf_counter()
            self.comm.ledger.ended(self.line, end)
            self.comm._tell(self.op, self.begin, waited_from, end, self.sent)
        return self.result

    def done(self) -> bool:
        return self.pending.done()


class _Mean:
    """A sum under way that is divided when it arrives."""

    def __init__(self, total: Work, by: float) -> None:
        self.total, self.by = total, by

    def wait(self) -> Tensor:
        return self.total.wait().div_(self.by)

    def done(self) -> bool:
        return self.total.done()


class _Complex:
    """Pairs of real numbers under way that are complex ones when they arrive."""

    def __init__(self, reals: Work) -> None:
        self.reals = reals

    def wait(self) -> Tensor:
        return torch.view_as_complex(self.reals.wait())

    def done(self) -> bool:
        return self.reals.done()


def all_gather_json(comm: Comm, value: Any, pad_bytes: int = 1024) -> list[Any]:
    """Every rank's JSON value on every rank. Text, never pickled objects, is what crosses the wire.

    It is padded to whole kibibytes, so that the digits of a time or the length of a path do not change the count.
    """
    text = json.dumps(value).encode()
    length = int(comm.max(torch.tensor([-(-len(text) // pad_bytes) * pad_bytes])).item())
    padded = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
    return [json.loads(bytes(t.tolist())) for t in comm.all_gather(padded)]


@torch.no_grad()
def coalesced(tensors: Sequence[Tensor], operation: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by what an operation makes of them, all of one dtype together: one round trip, not many."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        same = [t for t in tensors if t.dtype == dtype]
        flat = operation(torch.cat([t.reshape(-1) for t in same]))
        for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))
