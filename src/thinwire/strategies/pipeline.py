"""Pipeline parallelism: backpropagation through blocks on different ranks, the baseline of local parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.pipelining import Kind, Pipe, refuse_unfit_group
from thinwire.comm.process import ProcessComm
from thinwire.comm.recorded_pipe import RecordedPipe
from thinwire.comm.recording import RecordingComm
from thinwire.comm.work import Work
from thinwire.common.dtypes import bfloat16_autocast
from thinwire.common.messages import say
from thinwire.common.tensors import fingerprint
from thinwire.data import Batch, two_tensors
from thinwire.errors import UsageError
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.stages.cutting import Cut
from thinwire.strategies.stages.staged import Staged
from thinwire.surgery.costs import activations
from thinwire.surgery.segments import follow


class Pipeline(Staged):
    """Backpropagation with each block of the model on ranks of its own, by torch's GPipe or 1F1B schedule.

    A batch is split into M micro-batches, which go through the K blocks one after the other, and back. It computes what
    one rank would (BatchNorm sees micro-batches). Each rank is idle for (K−1)/(M+K−1) of every step, and longer if the
    link is slow. Wire bytes per step and boundary: |z| forward and |z| back. The tensors of
    the model that you give are taken out of it.

    Huang et al., "GPipe", 2019. 1F1B: Narayanan et al., "PipeDream", 2019.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        schedule: Kind = "1f1b",  # gpipe = all micro-batches forward, then all back; 1f1b = in turns, with less memory
        blocks: PositiveInt | None = None,  # number of blocks; default: one for each rank, if possible
        cut: Cut = "flops",  # blocks of equal flops, time or parameters, or that begin at given layers, as ['6', '12']
        microbatches: PositiveInt = 4,  # M: micro-batches of a batch; more = less idle time, smaller messages
        reducer: Reducer = mean(),  # how gradients are averaged over the replicas of a block
    ) -> None:
        if comm.is_simulated:
            raise UsageError("pipeline: torch's pipelines need processes; simulate cannot run them, thinwire train can")
        super().__init__("pipeline", model, recipe, comm, blocks, cut, reducer)
        if isinstance(self.layout.stages, ProcessComm):
            refuse_unfit_group(self.layout.stages, self.device)
        self.schedule, self.microbatches = schedule, microbatches

    def begin(self, inputs: Tensor, starts: Sequence[int] | None = None) -> None:
        example = inputs[:1].to(self.device)
        self.segments = follow(self.model, self.segments, example)
        with self._autocast():
            passed = activations([segment.module for segment in self.segments], example)
        super().begin(inputs, starts)
        bounds = [*self.starts, len(self.segments)]
        start, end = bounds[self.layout.stage_index : self.layout.stage_index + 2]
        about = self._forward, (passed[start], passed[end]), self._loss, self.schedule
        group = self.layout.stages
        if isinstance(group, RecordingComm):
            self.pipe: Pipe | RecordedPipe = RecordedPipe(group, *about)
        else:
            assert isinstance(group, ProcessComm)
            self.pipe = Pipe(group, *about)

    def _forward(self, x: Tensor) -> Tensor:
        with self._autocast():
            out: Tensor = self.stage.block(x)
        return out

    def _loss(self, out: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            return self.learner.loss_of_output(out, targets, len(targets) / self.num_samples)

    def _autocast(self) -> torch.autocast:
        return bfloat16_autocast(self.device, self.recipe.autocast)

    def step(self, batch: Batch) -> Tensor:
        inputs, targets = two_tensors(batch, self.device)
        if not self.has_begun:
            self.begin(inputs)
        num_micro_batches = self._num_micro_batches(len(inputs))
        self.learner.begin_step()
        sending = self._exchange_fingerprints(fingerprint(batch[1]))
        self.num_samples = len(inputs)
        self.learner.loss = self.pipe.step(inputs, targets, num_micro_batches)
        if sending is not None:
            sending.wait()
        self.exchange.finish()
        self.learner.update(total_norm=self._norm_over_stages)
        return self.learner.loss

    def _num_micro_batches(self, size: int) -> int:
        """The largest possible number: micro-batches are equal, and have two samples or more if the batch has."""
        asked, num_blocks = max(self.microbatches, self.recipe.accumulate), self.layout.num_stages
        number = max(m for m in range(1, asked + 1) if size % m == 0 and (size >= 2 * m or m == 1))
        is_as_asked = number == asked and (self.schedule == "gpipe" or number >= num_blocks)
        if not is_as_asked and self.learner.num_steps == 0:  # the last batch of an epoch may be smaller anyway
            gpipe = f", fewer than {num_blocks} blocks, so by gpipe's schedule" if number < num_blocks else ""
            say(f"pipeline: a batch of {size} goes in {number} equal micro-batches{gpipe}", self.comm.rank, once=True)
        return number

    def _exchange_fingerprints(self, own: int) -> Work | None:
        """Check that the previous stage has the same targets; returns the message to the next stage.

        This comes before torch's own messages, because gloo ends the process for a message that is too large.
        """
        group, index = self.layout.stages, self.layout.stage_index
        sent = torch.tensor([own])
        sending = None if self.layout.is_last else group.isend(sent, index + 1)
        if not self.layout.is_first:
            self.check_targets(int(group.recv(sent, index - 1)), own)
        return sending

    def _norm_over_stages(self, norm: Tensor) -> Tensor:
        """√Σ‖g_k‖² over the blocks, if the gradient is clipped by it."""
        return norm if self.recipe.clip_norm is None else self.layout.stages.sum(norm.square()).sqrt()
