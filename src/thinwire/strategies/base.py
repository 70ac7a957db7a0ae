"""What every strategy has in common: the interface, and the local step between two exchanges."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import registry
from thinwire.averaging import kept_buffers
from thinwire.comm.base import Comm, in_one_go
from thinwire.data import Batch, Shard, check_batch
from thinwire.errors import RunError, UsageError
from thinwire.optim import OptimizerFactory
from thinwire.overlap import Exchange, no_gradient
from thinwire.progress import say
from thinwire.surgery.hollow import refuse_emptied

CHECK_EVERY_STEPS = 20  # how often a GPU's losses and gradients are looked at; each look waits for it
SLOW_LR = 1e-5  # where a learning rate climbs from when a strategy begins something new
Loss = Callable[[Any, Tensor], Tensor]  # (model output, targets) → mean over the batch


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, whatever the strategy."""

    loss: Loss
    optimizer: OptimizerFactory  # a factory: some strategies make parameters in mid-run
    schedule: Callable[[int], float] = lambda step: 1.0  # step → factor of the learning rate
    clip_norm: float | None = None
    accumulate: int = 1  # pieces that a batch is computed in; more = less memory, same update
    autocast: bool = False
    epochs: int | None = None  # in all; for strategies that begin or end otherwise than they go on


class Strategy(Protocol):
    """A way to train one model on many ranks."""

    shard: Shard  # which part of each batch this rank reads
    ragged: bool = False  # whether ranks may have different numbers of batches in an epoch
    sees_loss: bool = True  # whether the losses that `step` returns on this rank are the whole model's

    def begin_epoch(self, num_steps: int | None) -> None:
        """An epoch begins, of so many steps if that is known."""

    def step(self, batch: Batch) -> Tensor:
        """One local update and whatever communication is due; returns this rank's loss."""

    def idle(self) -> None:
        """A step of others for which this rank has no batch; only where ranks may have different numbers of them."""
        raise UsageError(f"{type(self).__name__} needs a batch on every rank in every step; loop over tw.epoch")

    def end_epoch(self) -> None:
        """An epoch is over: bring together what drifted apart. Collective."""

    def status(self) -> dict[str, Any]:
        """Plain figures of where the method is, to be recorded after each epoch."""
        return {}

    def consolidate(self, factored: bool = False) -> nn.Module:
        """The whole trained model, equal on every rank, apart from the one being trained. Collective.

        `factored` leaves low-rank layers as two thin ones, where the strategy has any.
        """

    def to_test(self) -> nn.Module:
        """The whole trained model to run in eval mode, by all ranks equally often. Collective."""
        return self.consolidate()

    def exits(self) -> list[nn.Module]:
        """Models that end earlier than the whole one, shortest first, where the strategy has any. Collective."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on exactly."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


class Learner:
    """A model with its optimizer: forward, backward, update."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.num_steps = 0
        self.renew()
        self.loss = torch.zeros(())  # of the last step
        self._recent: list[Tensor] = []  # loss and norm of the gradient of steps not yet looked at

    def renew(self, states: Mapping[str, dict[str, Any]] | None = None) -> None:
        """A new optimizer for the parameters that there are now, with what it shall remember of some of them."""
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trainable:
            raise UsageError("the model has no parameter to train; set requires_grad on at least one")
        self.optimizer = self.recipe.optimizer(list(trainable.values()))
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        for name, state in (states or {}).items():
            if state and name in trainable:
                self.optimizer.state[trainable[name]] = state

    def let_go(self) -> None:
        """Hold no model and remember nothing of one, until another is set and `renew` is called."""
        self.model = nn.Module()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()

    def backward(self, batch: Batch, exchange: Exchange, exchanging: bool = True) -> Tensor:
        """Gradients of the mean loss over the batch, in `accumulate` pieces, exchanged or not; returns that loss."""
        device = next(self.model.parameters()).device
        check_batch(batch)
        inputs, targets = (t.to(device, non_blocking=True) for t in batch)
        pieces = list(zip(self.pieces(inputs), self.pieces(targets), strict=True))
        losses = []
        try:
            for i, (x, y) in enumerate(pieces, 1):
                with nullcontext() if exchanging and i == len(pieces) else exchange.accumulating():
                    with torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.autocast):
                        loss = self.recipe.loss(exchange.forward(x), y) * (len(x) / len(inputs))
                    loss.backward()
                losses.append(loss.detach())
        except RuntimeError as error:
            unfinished = "Expected to have finished reduction" in str(error)  # how DDP reports it, one step late
            raise exchange.error or (no_gradient() if unfinished else error) from None
        if exchanging:
            exchange.finish()
        self.loss = torch.stack(losses).sum()
        return self.loss

    def update(self, ease: float = 1.0, over_all: Callable[[Tensor], Tensor] = lambda norm: norm) -> None:
        """Check, clip, set the learning rate, step. `ease` 1 is the schedule's learning rate, 0 almost none.

        `over_all` makes the norm of the whole model's gradient from that of the part that is here.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = over_all(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_norm, norm)
        self._check(norm)
        factor = self.recipe.schedule(self.num_steps)
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = ease * lr * factor + (1 - ease) * min(lr * factor, SLOW_LR)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    def _check(self, norm: Tensor) -> None:
        """Stop on a gradient that is not finite: at once, but a GPU is looked at only now and then."""
        self._recent.append(torch.stack([self.loss.float(), norm.float()]))
        if norm.is_cuda and len(self._recent) < CHECK_EVERY_STEPS:
            return
        recent = torch.stack(self._recent).cpu()
        self._recent.clear()
        if not recent.isfinite().all():
            first = int((~recent.isfinite().all(1)).nonzero()[0])
            loss = recent[first, 0]
            raise not_finite(self.num_steps + 2 - len(recent) + first, None if loss.isfinite() else loss.item())

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would train into the caller's tensors
        self.num_steps = state["num_steps"]

    def pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """A batch in as many parts as it is computed in."""
        return tensor.tensor_split(max(1, min(self.recipe.accumulate, len(tensor) // 2)))  # BatchNorm needs two


def not_finite(step: int, loss: float | None) -> RunError:
    """The error for a step whose loss, or whose gradient, is not a number."""
    what = "the gradient is not finite" if loss is None else f"the loss is {loss}"
    return RunError(
        f"{what} at step {step}; try a lower --lr, a warm-up (--schedule 'cosine(warmup_epochs=1)') or --clip-norm 1"
    )


def replicate(model: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's parameters and buffers; say so if they were not equal."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in tensors]
    with comm.ledger.purpose("start"):
        in_one_go(tensors, comm.broadcast)
        tell_if_changed(before, tensors, comm)


def tell_if_changed(before: Sequence[Tensor], after: Sequence[Tensor], comm: Comm) -> None:
    """Say how many ranks do not begin with the weights that they were given. Collective."""
    changed = not all(torch.equal(old, new) or old.isnan().any() for old, new in zip(before, after, strict=True))
    others = int(torch.cat(comm.gather(torch.tensor([changed], dtype=torch.uint8))).sum())
    if others and comm.rank == 0:
        say(f"thinwire: the model differed between ranks; {others} of {comm.size} now begin with rank 0's weights")


def average_buffers(model: nn.Module, comm: Comm) -> None:
    """Make buffers equal on all ranks: the mean of floating-point ones, rank 0's value of the others.

    Only those that are part of the model's state: the others are caches that every rank computes for itself.
    """
    buffers = kept_buffers(model)
    with comm.ledger.purpose("sync", instead_of="train"):
        in_one_go([b for b in buffers if b.is_floating_point()], comm.mean)
        in_one_go([b for b in buffers if not b.is_floating_point()], comm.broadcast)


def consolidated(model: nn.Module, comm: Comm, apart: Sequence[str] = ()) -> nn.Module:
    """A copy of a model, equal on all ranks: the mean of those parameters that may differ between them."""
    whole = copy.deepcopy(model)
    with comm.ledger.purpose("sync", instead_of="train"):
        in_one_go([whole.get_parameter(name) for name in apart], comm.mean)
    average_buffers(whole, comm)
    return whole


def prepare(
    spec: str,
    *,
    model: nn.Module,
    optimizer: OptimizerFactory,
    loss: Loss,
    comm: Comm,
    schedule: Callable[[int], float] = lambda step: 1.0,
    clip_norm: float | None = None,
    accumulate: int = 1,
    autocast: bool = False,
    epochs: int | None = None,
) -> Strategy:
    """A trainer for your model: the strategy that a spec names, ready to `step`.

    `optimizer` is a factory because some strategies make parameters in mid-run. `schedule` maps a step to a
    factor of the learning rate. `epochs` is how many there will be, for strategies that have phases. All ranks start
    from rank 0's weights.

    >>> import thinwire as tw, torch
    >>> with tw.join() as comm:
    ...     trainer = tw.prepare("data_parallel", model=torch.nn.Linear(2, 1), comm=comm,
    ...                          optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=torch.nn.functional.mse_loss)
    ...     loss = trainer.step((torch.ones(4, 2), torch.zeros(4, 1)))
    ...     type(trainer.consolidate()).__name__
    'Linear'
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "optimizer: give a factory, not an optimizer: lambda parameters: torch.optim.SGD(parameters, 0.1)"
        )
    if not callable(loss) or isinstance(loss, type):
        raise UsageError(f"loss={loss!r}; give a function of (output, targets), as torch.nn.functional.cross_entropy")
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}; possible: 1 or more")
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"clip_norm={clip_norm}; possible: more than 0, or None to leave gradients as they are")
    if epochs is not None and (epochs < 1 or epochs != int(epochs)):
        raise UsageError(f"epochs={epochs}; give how many there will be, 1 or more, or leave it out")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={model!r}; give a module, as torch.nn.Linear(20, 2)")
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        raise UsageError(
            "model is wrapped in DistributedDataParallel, which would average gradients a second time; give the model "
            "in it, model.module, or keep the DDP and your loop: tw.attach"
        )
    refuse_emptied(model)
    recipe = Recipe(loss, optimizer, schedule, clip_norm, accumulate, autocast, epochs)
    strategy: Strategy = registry.build("strategies", spec, model, recipe, comm)
    return strategy
