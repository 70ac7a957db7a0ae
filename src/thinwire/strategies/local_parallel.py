"""Local parallelism: the network is cut into blocks, and every block trains itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from thinwire.codecs.features import Wire
from thinwire.comm.base import Comm
from thinwire.comm.copies import Copies
from thinwire.comm.queues import RecvQueue, SendQueue
from thinwire.common.dtypes import bfloat16_autocast
from thinwire.common.seeding import seeded
from thinwire.common.tensors import checksum, fingerprint
from thinwire.data import Batch, derive_seed, two_tensors
from thinwire.errors import RunError
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.strategies.base import Artifact
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.stages.costs import flops_with_local_losses
from thinwire.strategies.stages.cut_model import Stage
from thinwire.strategies.stages.cutting import Cut
from thinwire.strategies.stages.local_heads import build_heads, copies_of_last_layer
from thinwire.strategies.stages.staged import Staged
from thinwire.strategies.stages.windows import Losses, LossWindow
from thinwire.surgery.heads.base import Head, HeadModule
from thinwire.surgery.heads.suited import suited

SEEDING_WEIGHTS = 4096  # of the first layer: models that begin with other weights get other heads


class MicroBatch(NamedTuple):
    """A micro-batch in this block, between its forward and its backward pass."""

    z_in: Tensor  # z_{k−1}
    z: Tensor  # z_k
    gradients: dict[int, Tensor]  # ∂L_j/∂z_k by j


class LocalParallel(Staged):
    """Each block of the model trains with a loss of its own: activations go forward, no gradients come back.

    Block k receives z_{k−1}, computes z_k = f_k(z_{k−1}), sends it on at once, and then steps along the gradient of
    L_k = loss(head_k(z_k), y). No block waits for a gradient, so there is no bubble after the first batches. With a
    window of o, L_k reaches back through o blocks, and θ_k gets Σ_j ∂L_j/∂θ_k of j = k … k+o−1, or only the farthest of
    them. It is delayed, not stale: pipelined over ranks it computes what one process would, bit for bit. Wire bytes
    per step and boundary: |z|, and (o−1)·|z| back. The tensors of the model that you give are taken out of it.

    Laskin et al., "Parallel Training of Deep Networks with Local Updates", 2020. Windows: Gomez et al., "Interlocking
    Backpropagation", 2022.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        blocks: PositiveInt | None = None,  # number of blocks; default: one for each rank, if possible
        cut: Cut = "flops",  # blocks of equal flops, time or parameters, or that begin at given layers, as ['6', '12']
        head: Head = suited(),  # computes a block's loss: suited to the model, or another of `thinwire list heads`
        window: PositiveInt = 1,  # o: blocks that a loss reaches back through; more = closer to backprop, more waiting
        losses: Losses = "sum",  # which losses of its window train a block: sum of all, or farthest
        microbatches: PositiveInt = 1,  # micro-batches of a batch; more = less memory, smaller messages
        queue: PositiveInt = 2,  # micro-batches that may wait on each side of a boundary; more = smoother, more memory
        wire: Wire = "exact",  # how activations are sent: exact, bf16 or int8
        reducer: Reducer = mean(),  # how gradients are averaged over the replicas of a block
        seed: Annotated[int, Field(ge=0)] = 0,  # random seed of heads and dropout; the initial weights count too
    ) -> None:
        micro_batches = max(recipe.accumulate, microbatches)
        recipe = replace(recipe, accumulate=micro_batches)
        super().__init__("local_parallel", model, recipe, comm, blocks, cut, reducer)
        self.k, num_blocks, group = self.layout.stage_index, self.layout.num_stages, self.layout.stages
        self.head, self.window = head, LossWindow(num_blocks, min(window, num_blocks), losses)
        self.seed = derive_seed(seed, checksum(next(model.parameters()).flatten()[:SEEDING_WEIGHTS]))
        is_first, is_last = self.layout.is_first, self.layout.is_last
        self.z_from_previous = None if is_first else RecvQueue(group, self.k - 1, queue, self.device, wire)
        self.z_to_next = None if is_last else SendQueue(group, self.k + 1, queue, wire)
        self.gradients_to_previous = SendQueue(group, self.k - 1, num_blocks * micro_batches)  # all of a step
        self.gradients_from_next = RecvQueue(group, self.k + 1, 0, self.device)
        self.copies: Copies | None = None  # of the model's last layer, for heads that read with it

    def step(self, batch: Batch) -> Tensor:
        """For each micro-batch receive z_{k−1}, compute z_k, send it on, and go back from the local loss; then update.

        If gradients of later losses come back from the next block, all micro-batches wait for them in between.
        """
        inputs, targets = two_tensors(batch, self.device)
        if not self.has_begun:
            self.begin(inputs)
        self.steps_left = max(0, self.steps_left - 1)
        if self.copies is not None:
            self.copies.refresh(self.learner.num_steps)
        self.gradients_to_previous.flush()
        self.learner.begin_step()
        split = self.learner.micro_batches
        parts = list(zip(split(inputs), split(targets), map(fingerprint, split(batch[1])), strict=True))
        returning = self.window.crossing(self.k + 1)  # losses whose gradients the next block sends back
        losses, waiting = [], []
        for i, (x, y, own_fingerprint) in enumerate(parts):
            num_following = len(parts) - 1 - i + self.steps_left
            z_in = self._receive(x, own_fingerprint, num_following)
            micro_batch = MicroBatch(z_in, self._forward(i, z_in), {})
            if self.z_to_next is not None:
                self.z_to_next.put(micro_batch.z, num_following, own_fingerprint)
            losses.append(self._local_loss(i, micro_batch, y, len(x) / len(inputs)))
            if returning:
                waiting.append(micro_batch)
            else:
                self._backward(micro_batch)
        for j in returning:
            for micro_batch in waiting:
                micro_batch.gradients[j] = self.gradients_from_next.get()[1]
                self._send_back(j, micro_batch)
        for micro_batch in waiting:
            self._backward(micro_batch)
        self.exchange.finish()
        self.learner.loss = torch.stack(losses).sum()
        self.learner.update()
        return self.learner.loss

    # ---- the parts of a step

    def _receive(self, x: Tensor, own_fingerprint: int, num_following: int) -> Tensor:
        """z_{k−1}, from the previous block; the inputs x in the first block."""
        z_in = x
        if self.z_from_previous is not None:
            fingerprint_before, z_in = self.z_from_previous.get(num_following)
            self.check_targets(fingerprint_before, own_fingerprint)
        if self.window.crossing(self.k):
            z_in.requires_grad_()
        return z_in

    def _forward(self, number: int, z_in: Tensor) -> Tensor:
        """z_k = f_k(z_{k−1}), of the micro-batch with this number."""
        with self._computing(number, 0):
            z: Tensor = self.stage.block(z_in.clone() if z_in.requires_grad else z_in)  # a block may begin in place
        return z

    def _local_loss(self, number: int, micro_batch: MicroBatch, y: Tensor, weight: float) -> Tensor:
        """L_k = loss(head_k(z_k), y), and ∂L_k/∂z_k: the backward pass of the head, which ends at z_k."""
        if not self.window.is_used(self.k):
            return torch.zeros((), device=self.device)
        z = micro_batch.z.detach().requires_grad_()
        with self._computing(number, 1):
            loss = self._loss_of_head(z.clone(), y, weight) * weight  # a head may begin in place
        loss.backward()
        assert z.grad is not None
        micro_batch.gradients[self.k] = z.grad
        self._send_back(self.k, micro_batch)
        return loss.detach()

    def _loss_of_head(self, z: Tensor, y: Tensor, weight: float) -> Tensor:
        head, loss = self.stage.head, partial(self.learner.loss_of_output, share=weight)
        if isinstance(head, HeadModule):
            return head.loss(z, y, loss)
        return loss(z if head is None else head(z), y)

    def _send_back(self, loss: int, micro_batch: MicroBatch) -> None:
        """Send ∂L_j/∂z_{k−1} to the previous block if L_j reaches that far, unless `_backward` will do so."""
        if loss in self.window.crossing(self.k) and loss != self.window.training_and_crossing(self.k):
            z_in, z, gradients = micro_batch
            (gradient,) = torch.autograd.grad(z, z_in, gradients[loss], retain_graph=True)
            self.gradients_to_previous.put(gradient)

    def _backward(self, micro_batch: MicroBatch) -> None:
        """Add Σ_j ∂L_j/∂θ_k of the losses that train this block to its gradients."""
        z_in, z, gradients = micro_batch
        inputs: list[Tensor] = [p for p in self.stage.block.parameters() if p.requires_grad]
        goes_on = self.window.training_and_crossing(self.k) is not None
        if goes_on:
            inputs.append(z_in)
        if inputs:
            z.backward(functools.reduce(torch.add, [gradients[j] for j in self.window.training(self.k)]), inputs=inputs)
        if goes_on:
            assert z_in.grad is not None
            self.gradients_to_previous.put(z_in.grad)

    @contextmanager
    def _computing(self, number: int, part: int) -> Iterator[None]:
        """Inside, dropout depends on the position in the run and not on the rank; autocast is on if asked for."""
        position = self.k, self.layout.replica, self.learner.num_steps, number, part
        with (
            seeded(self.device, derive_seed(self.seed, *position)),
            bfloat16_autocast(self.device, self.recipe.autocast),
        ):
            yield

    def end_epoch(self) -> None:
        """Wait until all messages have arrived and all blocks have ended the epoch."""
        super().end_epoch()
        self.gradients_to_previous.flush()
        if self.z_to_next is not None:
            self.z_to_next.end()
        if self.z_from_previous is not None:
            self.z_from_previous.end()
        with self.comm.ledger.purpose("sync"):
            self.layout.stages.barrier()

    # ---- heads

    def begin(self, inputs: Tensor, starts: Sequence[int] | None = None) -> None:
        super().begin(inputs, starts)
        self.copies = copies_of_last_layer(self.cut_model, self.comm)
        self.steps_are_alike = self.steps_are_alike and self.copies is None

    def make_heads(self, passed: Sequence[Tensor], ends: Sequence[int]) -> list[nn.Module | None]:
        modules = [segment.module for segment in self.segments]
        return build_heads(self.head, self.window, modules, passed, ends, derive_seed(self.seed))

    def training_flops(self, stage: Stage, z_in: Tensor, z: Tensor) -> int:
        return flops_with_local_losses(stage, self.window, self.k, z_in, z)

    def exits(self) -> list[nn.Module]:
        """The blocks up to each head, with that head. Collective."""
        if not self.has_begun:
            raise RunError(
                "exits: there are no blocks before the first step; trainer.begin(inputs) cuts the model, too"
            )
        return self.cut_model.gather_exits()

    def artifacts(self) -> list[Artifact]:
        """The early exits, the shortest first."""
        about = "the model that ends after block {}, with its head"
        return [
            Artifact(f"exit-{k}", about.format(k), exit, f"exit-{k}.safetensors")
            for k, exit in enumerate(self.exits(), 1)
        ]

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        copies = self.copies.state_dict() if self.copies is not None else {}
        return super().state_dict() | {"seed": self.seed, "copies": copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seed = state["seed"]
        if self.copies is not None:
            self.copies.load_state_dict(state["copies"])
