"""Bounded queues of tensors from one rank to another, which are sent and received while both compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.codecs.features import Wire, pack, packed_bytes, unpack
from thinwire.comm.background import BackgroundWork
from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import PeerLost, UsageError

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
MAX_DIMENSIONS = 6
HEADER_NUMBERS = MAX_DIMENSIONS + 3  # fingerprint, dtype, number of dimensions, and the dimensions
EMPTY_HEADER = torch.tensor([0, 0, -1] + [0] * MAX_DIMENSIONS)  # of a message without a tensor


class SendQueue:
    """Sends tensors to one rank in order. `put` returns at once unless `capacity` of them are still in flight."""

    def __init__(self, comm: Comm, to: int, capacity: int, wire: Wire = "exact") -> None:
        self.comm, self.to, self.capacity, self.wire = comm, to, capacity, wire
        self.under_way: deque[list[Work]] = deque()
        self.num_expected = 0  # further messages that the receiver has begun to receive already

    def put(self, tensor: Tensor, num_following: int = 0, fingerprint: int = 0) -> None:
        """Send a tensor, which may change afterwards. At least `num_following` will be put after it.

        The receiver calls `get` with the same `num_following`. `fingerprint` is a number that it can check.
        """
        with _naming_stage(self.comm, self.to):
            while len(self.under_way) >= self.capacity:
                self._wait_for_oldest()
            parts = [make_header(tensor, fingerprint), pack(tensor, self.wire)]
            self.under_way.append([self.comm.isend(part, self.to) for part in parts])
        self.num_expected = min(self.capacity, num_following) if self.comm.is_async else 0

    def end(self) -> None:
        """No tensor will follow for now: send an empty message for each that the receiver expects."""
        with _naming_stage(self.comm, self.to):
            self.under_way += [[self.comm.isend(EMPTY_HEADER, self.to)] for _ in range(self.num_expected)]
        self.num_expected = 0
        self.flush()

    def flush(self) -> None:
        """Return once everything has been received."""
        with _naming_stage(self.comm, self.to):
            while self.under_way:
                self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work in self.under_way.popleft():
            work.wait()


class RecvQueue:
    """Receives tensors from one rank in order, up to `capacity` of them before they are asked for.

    A started receive cannot be cancelled, so each needs a message, in the end an empty one. Sender and receiver are
    given the same `num_following`, and from it both know how many receives were started.
    """

    def __init__(self, comm: Comm, source: int, capacity: int, device: torch.device, wire: Wire = "exact") -> None:
        self.comm, self.source, self.capacity, self.device, self.wire = comm, source, capacity, device, wire
        self.coming: deque[BackgroundWork[tuple[int, Tensor]]] = deque()

    def get(self, num_following: int = 0) -> tuple[int, Tensor]:
        """The fingerprint of the next tensor, and the tensor.

        At least `num_following` come after it; only those are received before they are asked for.
        """
        with _naming_stage(self.comm, self.source):
            fingerprint, tensor = self.coming.popleft().wait() if self.coming else self._receive()
            if tensor.is_cuda:  # it was made on the other thread's stream, which must not reuse its memory too early
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            while self.comm.is_async and len(self.coming) < min(self.capacity, num_following):
                self.coming.append(self.comm.in_background(self._receive, self.device))
            return fingerprint, tensor

    def end(self) -> None:
        """Receive the empty messages that the sender's `end` sends."""
        with _naming_stage(self.comm, self.source):
            while self.coming:
                self.coming.popleft().wait()

    def _receive(self) -> tuple[int, Tensor]:
        header = self.comm.recv(torch.zeros(HEADER_NUMBERS, dtype=torch.int64), self.source)
        fingerprint, code, ndim, *sizes = header.tolist()
        shape, dtype = sizes[:ndim], DTYPES[code]
        if ndim < 0:
            return fingerprint, torch.empty(0)
        like = torch.empty(packed_bytes(shape, dtype, self.wire), dtype=torch.uint8, device=self.device)
        return fingerprint, unpack(self.comm.recv(like, self.source), shape, dtype, self.wire)


def make_header(tensor: Tensor, fingerprint: int = 0) -> Tensor:
    """What the receiver must know before it receives a tensor: fingerprint, dtype and shape.

    >>> make_header(torch.zeros(2, 3), fingerprint=7).tolist()
    [7, 0, 2, 2, 3, 0, 0, 0, 0]
    """
    if tensor.dtype not in DTYPES:
        possible = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UsageError(f"blocks cannot pass on {tensor.dtype}; possible: {possible}; cut the model elsewhere")
    if tensor.ndim > MAX_DIMENSIONS:
        raise UsageError(
            f"blocks cannot pass on tensors of {tensor.ndim} dimensions; possible: up to {MAX_DIMENSIONS}; flatten "
            "some of them, or cut the model elsewhere"
        )
    numbers = [fingerprint, DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(numbers + [0] * (HEADER_NUMBERS - len(numbers)))


@contextmanager
def _naming_stage(comm: Comm, rank: int) -> Iterator[None]:
    """Name the stage that could not be reached in the error."""
    try:
        yield
    except PeerLost as error:
        raise PeerLost(f"stage {rank + 1} of {comm.size} does not answer: {error}") from error
