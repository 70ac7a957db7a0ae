"""torch's own pipeline schedules over a group, with what they send entered in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from thinwire.comm.process import ProcessComm
from thinwire.comm.process_groups import peer_errors
from thinwire.common.tensors import num_bytes
from thinwire.errors import RunError, UsageError

Kind = Literal["gpipe", "1f1b"]
Block = Callable[[Tensor], Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
VOTE_BYTES = 4  # that stages of a new schedule tell each neighbour


class Pipe:
    """This rank's stage of a pipeline: forward and backward passes of a batch in equal microbatches.

    Shapes are told to torch beforehand: else its stages would find them out by unpickling what the others send.
    """

    def __init__(
        self, comm: ProcessComm, block: Block, ends: tuple[Tensor, Tensor], loss: LossFunction, kind: Kind
    ) -> None:
        if comm.backend == "gloo" and ends[0].is_cuda:
            raise UsageError(
                "pipeline: torch's pipelines on GPUs need nccl, with a GPU for each rank; try --device cpu"
            )
        self.comm, self.kind, self.loss, self.ends = comm, kind, loss, ends
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        self.module = _Bounded(block, ends[1], self.is_first)
        self.schedules: dict[tuple[int, int], tuple[ScheduleGPipe | Schedule1F1B, _TimedStage]] = {}

    def step(self, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
        """Add the gradient of the mean loss to `.grad`; returns the loss on the last stage, 0 on the others."""
        schedule, stage = self._schedule(len(inputs) // microbatches, microbatches)
        self._book(len(inputs))
        given, wanted = (inputs,) if self.is_first else (), targets if self.is_last else None
        losses: list[Tensor] = []
        stage.computed.clear()
        begin = time.perf_counter()
        try:
            with peer_errors():
                schedule.step(*given, target=wanted, losses=losses, return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ if isinstance(error.__cause__, RunError) else error from None  # torch wraps them
        self._note_waiting(begin, stage.computed)
        return (
            torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=inputs.device)
        )

    def _schedule(self, size: int, count: int) -> tuple[ScheduleGPipe | Schedule1F1B, _TimedStage]:
        """One that is kept for microbatches of this size; 1F1B needs as many of them as there are stages."""
        if (size, count) not in self.schedules:
            into, out = (_of_size(end, size) for end in self.ends)
            stage = _TimedStage(
                self.module, self.comm.rank, self.comm.size, self.ends[0].device,
                input_args=(into,), output_args=(out,), group=self.comm.group,
            )  # fmt: skip
            make = Schedule1F1B if self.kind == "1f1b" and count >= self.comm.size else ScheduleGPipe
            schedule = make(stage, count, loss_fn=lambda out, y: self.loss(out, y) / count, scale_grads=False)
            self.schedules[size, count] = schedule, stage
            for neighbour in self._neighbours():
                self.comm.book("send", VOTE_BYTES, {neighbour: VOTE_BYTES})
        return self.schedules[size, count]

    def _neighbours(self) -> list[int]:
        return [r for r in (self.comm.rank - 1, self.comm.rank + 1) if 0 <= r < self.comm.size]

    def _book(self, size: int) -> None:
        """Activations go to the next stage, and their gradients, of the same size, to the one before."""
        for neighbour in self._neighbours():
            payload = num_bytes(_of_size(self.ends[neighbour > self.comm.rank], size))
            self.comm.book("send", payload, {neighbour: payload})

    def _note_waiting(self, begin: float, computed: list[tuple[float, float]]) -> None:
        """Between passes there is nothing to do but wait for other stages."""
        timeline = self.comm.ledger.timeline
        for pass_begin, pass_end in [*computed, (time.perf_counter(), 0.0)]:
            timeline.add_operation("pipeline", begin, pass_begin, 0)
            timeline.add_waiting(begin, pass_begin)
            begin = pass_end


class _TimedStage(PipelineStage):
    """Notes when it computes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.computed: list[tuple[float, float]] = []

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._timed(super().forward_one_chunk, *args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._timed(super().backward_one_chunk, *args, **options)

    def _timed(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = run(*args, **options)
        self.computed.append((begin, time.perf_counter()))
        return result


class _Bounded(nn.Module):
    """A stage whose input may be changed in place, and whose output is what the next stage has room for.

    torch does not check that: gloo would take a message that is too small, and end the process for one too large.
    """

    def __init__(self, block: Block, out: Tensor, is_first: bool) -> None:
        super().__init__()
        self.block, self.out, self.is_first = block, out, is_first

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x if self.is_first else x.clone())
        if (y.shape[1:], y.dtype) != (self.out.shape[1:], self.out.dtype):
            raise RunError(
                f"pipeline: a block passes on {tuple(y.shape[1:])} of {y.dtype} a sample, but in the first batch it "
                f"was {tuple(self.out.shape[1:])} of {self.out.dtype}; give batches of samples of one shape"
            )
        return y.contiguous()


def _of_size(example: Tensor, size: int) -> Tensor:
    """What a microbatch of this many samples looks like; torch sends no gradient for one that says it needs none."""
    needs = example.is_floating_point()
    return torch.empty((size, *example.shape[1:]), dtype=example.dtype, device="meta", requires_grad=needs)
