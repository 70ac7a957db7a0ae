"""torch's pipeline schedules on ranks that are recorded: the same order of passes and messages, over a Comm."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm.pipelining import HANDSHAKE_BYTES, Block, Kind, LossFunction
from thinwire.comm.recording import RecordingComm
from thinwire.comm.work import Work


class RecordedPipe:
    """This rank's stage of a pipeline. torch's own schedules need real process groups."""

    def __init__(
        self, comm: RecordingComm, block: Block, examples: tuple[Tensor, Tensor], loss: LossFunction, kind: Kind
    ) -> None:
        self.comm, self.block, self.examples, self.loss, self.kind = comm, block, examples, loss, kind
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        self.known: set[tuple[int, int]] = set()  # sizes and numbers of micro-batches that had a handshake

    def step(self, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
        """Add the gradient of the mean loss to `.grad`; returns the loss on the last stage, 0 on the others."""
        self._shake_hands(len(inputs) // microbatches, microbatches)
        self.inputs, self.targets = inputs.chunk(microbatches), targets.chunk(microbatches)
        self.passed: list[
            tuple[Tensor, Tensor]
        ] = []  # input and output, or loss, of each micro-batch that went forward
        self.done = 0  # micro-batches that went back
        sending: list[Work] = []
        is_1f1b = self.kind == "1f1b" and microbatches >= self.comm.size
        ahead = self.comm.size - self.comm.rank if is_1f1b else microbatches
        for _ in range(min(microbatches, ahead)):
            sending += self._forward()
        while self.done < microbatches:
            sending += self._backward()
            if len(self.passed) < microbatches:
                sending += self._forward()
        for work in sending:
            work.wait()
        losses = [out.detach() for _, out in self.passed] if self.is_last else []
        return torch.stack(losses).mean() if losses else torch.zeros((), device=inputs.device)

    def _shake_hands(self, size: int, microbatches: int) -> None:
        if (size, microbatches) not in self.known:
            self.known.add((size, microbatches))
            hand = torch.zeros(HANDSHAKE_BYTES, dtype=torch.uint8)
            neighbours = [r for r in (self.comm.rank - 1, self.comm.rank + 1) if 0 <= r < self.comm.size]
            sending = [self.comm.isend(hand, neighbour) for neighbour in neighbours]
            for neighbour in neighbours:
                self.comm.recv(hand, neighbour)
            for work in sending:
                work.wait()

    def _forward(self) -> list[Work]:
        """A micro-batch from the previous stage through the block, and on to the next stage."""
        number = len(self.passed)
        x = self.inputs[number]
        if not self.is_first:
            x = self.comm.recv(self._like(self.examples[0], len(x)), self.comm.rank - 1)
            x.requires_grad_(x.is_floating_point())
        out = self.block(x.clone() if x.requires_grad else x)
        if self.is_last:
            out = self.loss(out, self.targets[number])
        self.passed.append((x, out))
        return [] if self.is_last else [self.comm.isend(out.detach(), self.comm.rank + 1)]

    def _backward(self) -> list[Work]:
        """The gradient of a micro-batch from the next stage through the block, and on to the previous stage."""
        x, out = self.passed[self.done]
        self.done += 1
        if self.is_last:
            (out / len(self.inputs)).backward()
        else:
            out.backward(self.comm.recv(torch.empty_like(out), self.comm.rank + 1))
        if self.is_first:
            return []
        assert x.grad is not None
        return [self.comm.isend(x.grad, self.comm.rank - 1)]

    def _like(self, example: Tensor, size: int) -> Tensor:
        return torch.empty((size, *example.shape[1:]), dtype=example.dtype, device=example.device)
