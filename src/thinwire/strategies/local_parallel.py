"""Local parallelism: the network is cut into blocks, and every block trains itself."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from thinwire.codecs.features import Wire
from thinwire.comm.base import Comm
from thinwire.comm.copies import Copies
from thinwire.comm.queues import RecvQueue, SendQueue
from thinwire.data import Batch, derive_seed, to_device
from thinwire.errors import RunError
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.strategies.base import Artifact
from thinwire.strategies.learner import Recipe
from thinwire.strategies.staged import Cut, Staged, fingerprint, seeded
from thinwire.surgery.costs import flops
from thinwire.surgery.heads.base import Boundary, Head, HeadModule
from thinwire.surgery.heads.readout import Readout
from thinwire.surgery.heads.suited import suited
from thinwire.surgery.meta import with_tensors

SEEDING_WEIGHTS = 4096  # of the first layer: heads of models that begin differently do, too
Piece = tuple[Tensor, Tensor, dict[int, Tensor]]  # what went into the block, what came out, losses' gradients there


class LocalParallel(Staged):
    """Each block of the model trains with a loss of its own: activations go forward, no gradients come back.

    Block k gets z_{k−1}, computes z_k = f_k(z_{k−1}), sends it on at once, and then steps along the gradient of
    L_k = loss(head_k(z_k), y). Nobody waits for a gradient from behind, so there is no bubble after the first batches.
    With a window of o, L_k reaches back through o blocks, and θ_k gets Σ_j ∂L_j/∂θ_k of its window j = k … k+o−1, or
    only the farthest of them. It is delayed, not stale: pipelined over ranks it computes what one process would, bit
    for bit. Wire bytes per step and boundary: |z|, and (o−1)·|z| back. The model that you give is emptied.

    Laskin et al., "Parallel Training of Deep Networks with Local Updates", 2020. Overlap: Gomez et al., "Interlocking
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
        losses: Literal["sum", "farthest"] = "sum",  # which losses of its window train a block: sum of all, or farthest
        microbatches: PositiveInt = 1,  # micro-batches of a batch; more = less memory, smaller messages
        queue: PositiveInt = 2,  # micro-batches that may wait on each side of a boundary; more = smoother, more memory
        wire: Wire = "exact",  # how activations are sent: exact, bf16 or int8
        reducer: Reducer = mean(),  # how gradients are averaged over the replicas of a block
        seed: Annotated[int, Field(ge=0)] = 0,  # random seed for heads and dropout, hashed with the first weights
    ) -> None:
        pieces = max(recipe.accumulate, microbatches)
        super().__init__("local_parallel", model, replace(recipe, accumulate=pieces), comm, blocks, cut, reducer)
        self.head, self.window, self.losses = head, min(window, self.num_blocks), losses
        some = next(model.parameters()).detach().flatten()[:SEEDING_WEIGHTS].cpu().contiguous()
        self.seed = derive_seed(seed, zlib.crc32(some.view(torch.uint8).numpy().tobytes()))
        device, far = next(model.parameters()).device, self.num_blocks * pieces
        before, after = self.number - 1, self.number + 1
        self.inbox = RecvQueue(self.column, before, queue, device, wire) if not self.is_first else None
        self.outbox = SendQueue(self.column, after, queue, wire) if not self.is_last else None
        self.gradients_out = SendQueue(self.column, before, far)  # those of one step
        self.gradients_in = RecvQueue(self.column, after, 0, device)
        self.copies: Copies | None = None  # of the model's last layer, where heads read with one

    # ---- which loss trains whom

    def _used(self, loss: int) -> bool:
        """Does a block's loss train any block?"""
        return self.losses == "sum" or loss >= self.window - 1 or loss == self.num_blocks - 1

    def _trained_by(self, block: int) -> list[int]:
        """The losses that train a block, nearest first."""
        window = range(block, min(block + self.window, self.num_blocks))
        return list(window) if self.losses == "sum" else [window[-1]]

    def _passing(self, boundary: int) -> list[int]:
        """The losses whose gradients cross from a block back to the one before it."""
        window = range(boundary, min(boundary + self.window - 1, self.num_blocks)) if boundary > 0 else range(0)
        return [loss for loss in window if self._used(loss)]

    def _in_one_pass(self, block: int) -> list[int]:
        """The loss, if any, that alone trains a block and goes on through it: one pass gives both gradients."""
        last = self._passing(block)[-1:]
        return last if last == self._trained_by(block) else []

    # ---- training

    def step(self, batch: Batch) -> Tensor:
        inputs, targets = to_device(batch, self.device)
        if not self.begun:
            self.begin(inputs)
        self.steps_left = max(0, self.steps_left - 1)
        if self.copies is not None:
            self.copies.refresh(self.learner.num_steps)
        self.gradients_out.flush()
        self.learner.zero_grad()
        pieces = list(zip(self.learner.micro_batches(inputs), self.learner.micro_batches(targets), strict=True))
        prints = [fingerprint(y) for y in self.learner.micro_batches(batch[1])]
        arriving = self._passing(self.number + 1)
        losses, waiting = [], []
        for i, (x, y) in enumerate(pieces):
            z_in = self._input(x, prints[i], more := len(pieces) - 1 - i + self.steps_left)
            z = self._activation(i, z_in)
            if self.outbox is not None:
                self.outbox.put(z, more, prints[i])
            piece, loss = self._judged(i, z_in, z, y, len(x) / len(inputs))
            losses.append(loss)
            waiting.append(piece)
            if not arriving:
                self._backward(*waiting.pop())
        for j in arriving:
            for z_in, z, gradients in waiting:
                gradients[j] = self.gradients_in.get()[1]
                self._pass_on(j, z_in, z, gradients[j])
        for piece in waiting:
            self._backward(*piece)
        self.exchange.finish()
        self.learner.loss = torch.stack(losses).sum()
        self.learner.update()
        return self.learner.loss

    def _input(self, x: Tensor, own_print: int, more: int) -> Tensor:
        """z_{k−1} of the targets that this rank has; the batch's inputs in the first block."""
        z_in = x
        if self.inbox is not None:
            its_print, z_in = self.inbox.get(more)
            self.check_batch(its_print, own_print)
        if self._passing(self.number):
            z_in.requires_grad_()
        return z_in

    def _activation(self, piece: int, z_in: Tensor) -> Tensor:
        """z_k = f_k(z_{k−1})."""
        with self._computing(piece, 0):
            z: Tensor = self.stage.block(z_in.clone() if z_in.requires_grad else z_in)
        return z

    def _judged(self, piece: int, z_in: Tensor, z: Tensor, y: Tensor, weight: float) -> tuple[Piece, Tensor]:
        """This block's own loss, and its gradient with respect to z_k."""
        gradients: dict[int, Tensor] = {}
        loss = torch.zeros((), device=z.device)
        if self._used(self.number):
            shown = z.detach().requires_grad_()
            with self._computing(piece, 1):
                loss = self._loss(shown.clone(), y) * weight  # a head may begin in place
            loss.backward()
            assert shown.grad is not None
            gradients[self.number] = shown.grad
            self._pass_on(self.number, z_in, z, shown.grad)
        return (z_in, z, gradients), loss.detach()

    @contextmanager
    def _computing(self, piece: int, part: int) -> Iterator[None]:
        """Under autocast if asked for; dropout depends on where in the run it is, not on the rank that computes it."""
        device, place = self.device, (self.number, self.replica, self.learner.num_steps, piece, part)
        with (
            seeded(device, self.seed, *place),
            torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.autocast),
        ):
            yield

    def _loss(self, z: Tensor, y: Tensor) -> Tensor:
        head = self.stage.head
        if isinstance(head, HeadModule):
            return head.loss(z, y, self.recipe.loss)
        return self.recipe.loss(z if head is None else head(z), y)

    def _pass_on(self, loss: int, z_in: Tensor, z: Tensor, gradient: Tensor) -> None:
        """∂L_j/∂z_{k−1} to the block before, if L_j reaches that far."""
        if loss in self._passing(self.number) and loss not in self._in_one_pass(self.number):
            (at_input,) = torch.autograd.grad(z, z_in, gradient, retain_graph=True)
            self.gradients_out.put(at_input)

    def _backward(self, z_in: Tensor, z: Tensor, gradients: dict[int, Tensor]) -> None:
        """∂L/∂θ_k of all losses that train this block."""
        also = [z_in] if self._in_one_pass(self.number) else []
        wanted = [p for p in self.stage.block.parameters() if p.requires_grad] + also
        if wanted:
            total = functools.reduce(torch.add, [gradients[j] for j in self._trained_by(self.number)])
            z.backward(total, inputs=wanted)
        for one in also:
            assert one.grad is not None
            self.gradients_out.put(one.grad)

    def end_epoch(self) -> None:
        """Wait until what is under way has arrived, and all blocks are as far."""
        super().end_epoch()
        self.gradients_out.flush()
        if self.outbox is not None:
            self.outbox.end()
        if self.inbox is not None:
            self.inbox.end()
        with self.comm.ledger.purpose("sync"):
            self.column.barrier()

    # ---- heads

    def heads(self, seen: Sequence[Tensor], ends: Sequence[int]) -> list[nn.Module | None]:
        modules = [segment.module for segment in self.segments]
        with seeded(torch.device("cpu"), self.seed):
            return [
                self.head.build(Boundary(seen[end], seen[-1], modules[end:], seen[end:-1], k, self.num_blocks))
                if k < self.num_blocks - 1 and self._used(k)
                else None
                for k, end in enumerate(ends)
            ]

    def flops_of(self, block: nn.Module, head: nn.Module | None, z_in: Tensor, z: Tensor) -> int:
        shared = self._in_one_pass(self.number)
        total = flops(block, z_in, input_gradient=bool(shared)) + (flops(head, z, input_gradient=True) if head else 0)
        alone = len(self._passing(self.number)) - len(shared)
        if alone:
            forward = flops(block, z_in, input_gradient=False, weights=False)
            total += alone * (flops(block, z_in, input_gradient=True, weights=False) - forward)
        return total

    def exits(self) -> list[nn.Module]:
        """The blocks up to each head, with that head. Collective."""
        if not self.begun:
            raise RunError(
                "exits: there are no blocks before the first step; trainer.begin(inputs) cuts the model, too"
            )
        stages = [
            with_tensors(stage, tensors) for stage, tensors in zip(self.stages, self.gathered(heads=True), strict=True)
        ]
        return [
            nn.Sequential(*(early.get_submodule("block") for early in stages[: k + 1]), stage.get_submodule("head"))
            for k, stage in enumerate(stages)
            if stage.head is not None
        ]

    def artifacts(self) -> list[Artifact]:
        """The early exits, the shortest first."""
        about = "the model that ends after block {}, with its head"
        return [
            Artifact(f"exit-{k}", about.format(k), exit, f"exit-{k}.safetensors")
            for k, exit in enumerate(self.exits(), 1)
        ]

    # ---- states

    def begin(self, inputs: Tensor, starts: Sequence[int] | None = None) -> None:
        super().begin(inputs, starts)
        readers = {k: stage.head for k, stage in enumerate(self.stages) if isinstance(stage.head, Readout)}
        if readers:
            head = self.stage.head
            module = (
                head.last_segment if isinstance(head, Readout) else next(reversed(list(self.stage.block.children())))
            )
            ranks = [k * self.num_replicas + self.replica for k in readers]
            last = (self.num_blocks - 1) * self.num_replicas + self.replica
            self.copies = Copies(self.comm, module, last, ranks, next(iter(readers.values())).every)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "seed": self.seed,
            "copies": self.copies.state_dict() if self.copies is not None else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seed = state["seed"]
        if self.copies is not None:
            self.copies.load_state_dict(state["copies"])
