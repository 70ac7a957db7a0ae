"""Pipeline parallelism: backpropagation through blocks on different ranks, the baseline of local parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.pipelining import Kind, Pipe
from thinwire.comm.process import ProcessComm
from thinwire.common.messages import say
from thinwire.data import Batch, to_device
from thinwire.errors import UsageError
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.strategies.learner import Recipe
from thinwire.strategies.staged import Cut, Staged, fingerprint
from thinwire.surgery.costs import activations


class Pipeline(Staged):
    """Backpropagation with each block of the model on ranks of its own, by torch's GPipe or 1F1B schedule.

    A batch is cut into M microbatches, which follow one another through the K blocks and back. It computes what one
    rank would (BatchNorm sees microbatches); each rank stands still for (K−1)/(M+K−1) of every step, and longer where
    the wire is slow. Wire bytes per step and boundary: |z| forward and |z| back. The model that you give is emptied.

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
        if not isinstance(comm, ProcessComm):
            raise UsageError("pipeline: torch's pipelines need processes; simulate cannot run them, thinwire train can")
        super().__init__("pipeline", model, recipe, comm, blocks, cut, reducer)
        self.schedule, self.microbatches = schedule, microbatches

    def begin(self, inputs: Tensor, starts: Sequence[int] | None = None) -> None:
        with self._half():
            passing = activations([segment.module for segment in self.segments], inputs[:1].to(self.device))
        super().begin(inputs, starts)
        assert isinstance(self.column, ProcessComm)
        edges = [passing[i] for i in (*self.starts, len(self.segments))]
        ends = edges[self.number], edges[self.number + 1]
        self.pipe = Pipe(self.column, self._block, ends, self._loss, self.schedule)

    def _block(self, x: Tensor) -> Tensor:
        with self._half():
            out: Tensor = self.stage.block(x)
        return out

    def _loss(self, out: Tensor, targets: Tensor) -> Tensor:
        with self._half():
            return self.recipe.loss(out, targets)

    def _half(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.autocast)

    def step(self, batch: Batch) -> Tensor:
        inputs, targets = to_device(batch, self.device)
        if not self.begun:
            self.begin(inputs)
        parts = max(self.microbatches, self.recipe.accumulate)
        count = max(m for m in range(1, parts + 1) if len(inputs) % m == 0 and (len(inputs) >= 2 * m or m == 1))
        whole = count == parts and (self.schedule == "gpipe" or count >= self.num_blocks)
        if not whole and self.learner.num_steps == 0:  # an epoch's last batch may well be smaller
            self._tell(len(inputs), count)
        self.learner.zero_grad()
        own_print = torch.tensor([fingerprint(batch[1])])
        going = None if self.is_last else self.column.isend(own_print, self.number + 1)
        coming = None if self.is_first else self.column.irecv(own_print, self.number - 1)
        if coming is not None:  # before torch's own messages: gloo ends the process for one that is too large
            self.check_batch(int(coming.wait()), int(own_print))
        self.learner.loss = self.pipe.step(inputs, targets, count)
        if going is not None:
            going.wait()
        self.exchange.finish()
        self.learner.update(total_norm=self._norm_of_the_whole)
        return self.learner.loss

    def _tell(self, size: int, count: int) -> None:
        gpipe = f", fewer than {self.num_blocks} blocks, so by gpipe's schedule" if count < self.num_blocks else ""
        say(f"pipeline: a batch of {size} goes in {count} equal microbatches{gpipe}", self.comm.rank, once=True)

    def _norm_of_the_whole(self, norm: Tensor) -> Tensor:
        """√Σ‖g_k‖² over the blocks, where the gradient is clipped by it."""
        return norm if self.recipe.clip_norm is None else self.column.sum(norm.square()).sqrt()
