"""torch's pipeline schedules over a group. What they send is booked by formula."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from thinwire.comm.process import ProcessComm
from thinwire.comm.process_groups import MADE_BY_MEMBERS, peer_errors
from thinwire.common.tensors import num_bytes
from thinwire.errors import RunError, UsageError

Kind = Literal["gpipe", "1f1b"]
Block = Callable[[Tensor], Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
HANDSHAKE_BYTES = 4  # that each stage of a new schedule sends to each neighbour


def refuse_unfit_group(comm: ProcessComm, device: torch.device) -> None:
    """Raise UsageError for a group that torch's pipelines cannot use."""
    if comm.backend == "gloo" and device.type == "cuda":
        raise UsageError("pipeline: torch's pipelines on GPUs need nccl, with a GPU for each rank; try --device cpu")
    if comm.group.group_desc == MADE_BY_MEMBERS:
        raise UsageError("pipeline: torch's pipelines need groups of the whole world; give the comm of tw.join()")


class Pipe:
    """This rank's stage of a pipeline: forward and backward passes of a batch in equal micro-batches.

    `examples` are an input and an output of the stage. torch gets their shapes from us: else its stages would send
    them to each other as pickles.
    """

    def __init__(
        self, comm: ProcessComm, block: Block, examples: tuple[Tensor, Tensor], loss: LossFunction, kind: Kind
    ) -> None:
        self.comm, self.kind, self.loss, self.examples = comm, kind, loss, examples
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        self.module = _CheckedBlock(block, examples[1], self.is_first)
        self.schedules: dict[tuple[int, int], tuple[ScheduleGPipe | Schedule1F1B, _TimedStage]] = {}

    def step(self, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
        """Add the gradient of the mean loss to `.grad`; returns the loss on the last stage, 0 on the others."""
        schedule, stage = self._schedule(len(inputs) // microbatches, microbatches)
        self._book(len(inputs))
        own_inputs, own_targets = (inputs,) if self.is_first else (), targets if self.is_last else None
        losses: list[Tensor] = []
        stage.passes.clear()
        begin = time.perf_counter()
        with self.comm.inside(self.comm.begin("pipeline")):
            _run(lambda: schedule.step(*own_inputs, target=own_targets, losses=losses, return_outputs=False))
        self._add_waiting(begin, stage.passes)
        return (
            torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=inputs.device)
        )

    def _schedule(self, size: int, count: int) -> tuple[ScheduleGPipe | Schedule1F1B, _TimedStage]:
        """The schedule for `count` micro-batches of `size` samples. 1F1B needs at least as many as there are stages."""
        if (size, count) not in self.schedules:
            into, out = (_on_meta(example, size) for example in self.examples)
            stage = _TimedStage(
                self.module, self.comm.rank, self.comm.size, self.examples[0].device,
                input_args=(into,), output_args=(out,), group=self.comm.group,
            )  # fmt: skip
            make = Schedule1F1B if self.kind == "1f1b" and count >= self.comm.size else ScheduleGPipe
            schedule = make(stage, count, loss_fn=lambda out, y: self.loss(out, y) / count, scale_grads=False)
            self.schedules[size, count] = schedule, stage
            for neighbour in self._neighbours():
                self.comm.book("send", HANDSHAKE_BYTES, {neighbour: HANDSHAKE_BYTES})
        return self.schedules[size, count]

    def _neighbours(self) -> list[int]:
        return [r for r in (self.comm.rank - 1, self.comm.rank + 1) if 0 <= r < self.comm.size]

    def _book(self, size: int) -> None:
        """Activations go to the next stage, and gradients of its inputs to the previous one."""
        for neighbour in self._neighbours():
            payload = num_bytes(_on_meta(self.examples[neighbour > self.comm.rank], size))
            self.comm.book("send", payload, {neighbour: payload})

    def _add_waiting(self, begin: float, passes: list[tuple[float, float]]) -> None:
        """Between its forward and backward passes, a stage waits for other stages."""
        timeline = self.comm.ledger.timeline
        for pass_begin, pass_end in [*passes, (time.perf_counter(), 0.0)]:
            timeline.add_operation("pipeline", begin, pass_begin, 0)
            timeline.add_waiting(begin, pass_begin)
            begin = pass_end


def _run(step: Callable[[], Any]) -> None:
    try:
        with peer_errors():
            step()
    except RuntimeError as error:
        raise error.__cause__ if isinstance(error.__cause__, RunError) else error from None  # torch has wrapped it


class _TimedStage(PipelineStage):
    """Keeps the begin and end of each forward and backward pass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.passes: list[tuple[float, float]] = []

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._timed(super().forward_one_chunk, *args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._timed(super().backward_one_chunk, *args, **options)

    def _timed(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = run(*args, **options)
        self.passes.append((begin, time.perf_counter()))
        return result


class _CheckedBlock(nn.Module):
    """A block that may change its input in place, and whose output must have the shape that the next stage expects.

    torch does not check it: gloo accepts a message that is too small, and ends the process for one that is too large.
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


def _on_meta(example: Tensor, size: int) -> Tensor:
    """A micro-batch of `size` samples on the meta device. torch sends gradients only of tensors that require them."""
    needs = example.is_floating_point()
    return torch.empty((size, *example.shape[1:]), dtype=example.dtype, device="meta", requires_grad=needs)
