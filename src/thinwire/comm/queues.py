"""Mail between two ranks: tensors of any shape in bounded queues, under way while both compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.codecs.features import Wire, pack, packed_bytes, unpack
from thinwire.comm.background import BackgroundWork
from thinwire.comm.base import Comm, Work
from thinwire.common.tensors import named_tensors, num_bytes
from thinwire.errors import PeerLost, UsageError

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
MAX_DIMENSIONS = 6
LABEL_NUMBERS = MAX_DIMENSIONS + 3  # what it is about, dtype, number of dimensions, and the dimensions
BLANK = torch.tensor([0, 0, -1] + [0] * MAX_DIMENSIONS)  # the label of nothing


class SendQueue:
    """Sends tensors to one rank in order, and returns at once unless `room` of them are still under way."""

    def __init__(self, comm: Comm, to: int, room: int, wire: Wire = "exact") -> None:
        self.comm, self.to, self.room, self.wire = comm, to, room, wire
        self.under_way: deque[list[Work]] = deque()
        self.awaited = 0  # messages that the receiver has made room for already

    def put(self, tensor: Tensor, more: int = 0, about: int = 0) -> None:
        """Send a tensor; it may change afterwards. The receiver gives the same `more`: how many will follow.

        `about` is a number that the receiver can check, as a fingerprint of the batch that the tensor is of.
        """
        with named(self.comm, self.to):
            while len(self.under_way) >= self.room:
                self._wait_for_oldest()
            parts = [label(tensor, about), pack(tensor, self.wire)]
            self.under_way.append([self.comm.isend(part, self.to) for part in parts])
        self.awaited = min(self.room, more) if self.comm.is_async else 0

    def end(self) -> None:
        """No more will follow for now, whatever was said: empty messages for those that are awaited."""
        with named(self.comm, self.to):
            self.under_way += [[self.comm.isend(BLANK, self.to)] for _ in range(self.awaited)]
        self.awaited = 0
        self.flush()

    def flush(self) -> None:
        """Return once everything has been received."""
        with named(self.comm, self.to):
            while self.under_way:
                self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for pending in self.under_way.popleft():
            pending.wait()


class RecvQueue:
    """Receives tensors from one rank in order, up to `room` of them before they are asked for.

    Both ends are told how many messages are sure to follow (`more`), and by that alone both know how many the receiver
    has made room for: a receive cannot be taken back, so each must be answered, at last by an empty message.
    """

    def __init__(self, comm: Comm, source: int, room: int, device: torch.device, wire: Wire = "exact") -> None:
        self.comm, self.source, self.room, self.device, self.wire = comm, source, room, device, wire
        self.coming: deque[BackgroundWork[tuple[int, Tensor]]] = deque()

    def end(self) -> None:
        """Wait for the empty messages that stand for those which will not come."""
        with named(self.comm, self.source):
            while self.coming:
                self.coming.popleft().wait()

    def take(self, more: int = 0) -> tuple[int, Tensor]:
        """What the next tensor is about, and the tensor.

        At least `more` are known to come after it: only those are received ahead of need.
        """
        with named(self.comm, self.source):
            about, tensor = self.coming.popleft().wait() if self.coming else self._receive()
            if tensor.is_cuda:  # its memory is of the other thread's stream, which must not have it back too early
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            while self.comm.is_async and len(self.coming) < min(self.room, more):
                self.coming.append(self.comm.in_background(self._receive, self.device))
            return about, tensor

    def _receive(self) -> tuple[int, Tensor]:
        about, code, ndim, *sizes = self.comm.recv(torch.zeros(LABEL_NUMBERS, dtype=torch.int64), self.source).tolist()
        shape, dtype = sizes[:ndim], DTYPES[code]
        if ndim < 0:
            return about, torch.empty(0)
        room = torch.empty(packed_bytes(shape, dtype, self.wire), dtype=torch.uint8, device=self.device)
        return about, unpack(self.comm.recv(room, self.source), shape, dtype, self.wire)


def label(tensor: Tensor, about: int = 0) -> Tensor:
    """What a tensor's receiver must know beforehand: what it is about, its type and its shape.

    >>> label(torch.zeros(2, 3), about=7).tolist()
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
    numbers = [about, DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(numbers + [0] * (LABEL_NUMBERS - len(numbers)))


@contextmanager
def named(comm: Comm, rank: int) -> Iterator[None]:
    """Say which stage it was that could not be reached."""
    try:
        yield
    except PeerLost as error:
        raise PeerLost(f"stage {rank + 1} of {comm.size} does not answer: {error}") from error


class Copies:
    """A module's tensors on other ranks: sent every so many steps, and used one such period later.

    Nobody waits for them: they have a whole period to travel, and which step uses which copy is known beforehand.
    """

    def __init__(self, comm: Comm, module: nn.Module, source: int, readers: Sequence[int], every: int) -> None:
        self.comm, self.module, self.source, self.readers, self.every = comm, module, source, readers, every
        self.sending: list[Work] = []
        self.coming: Work | None = None

    def refresh(self, step: int) -> None:
        """Called by every rank before every step."""
        if step == 0 or step % self.every:
            return
        if self.comm.rank == self.source:
            for pending in self.sending:
                pending.wait()
            self.sending = [self.comm.isend(self._bytes(), reader) for reader in self.readers]
        elif self.comm.rank in self.readers:
            if self.coming is not None:
                self._use(self.coming.wait())
            self.coming = self.comm.irecv(self._bytes(), self.source)

    def state_dict(self) -> dict[str, Any]:
        """The copy that is under way."""
        return {"coming": self.coming.wait()} if self.coming is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for pending in [*self.sending, *([self.coming] if self.coming is not None else [])]:
            pending.wait()
        self.sending = []
        self.coming = Arrived(state["coming"].to(self._bytes().device)) if "coming" in state else None

    def _bytes(self) -> Tensor:
        return torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in named_tensors(self.module).values()])

    @torch.no_grad()
    def _use(self, data: Tensor) -> None:
        tensors = list(named_tensors(self.module).values())
        for tensor, part in zip(tensors, data.split([num_bytes(t) for t in tensors]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


class Arrived(NamedTuple):
    """A message that is here."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor

    def done(self) -> bool:
        return True
