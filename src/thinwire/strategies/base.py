"""What every strategy has in common: the interface, and how ranks begin and end with equal weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import registry
from thinwire.comm.base import Comm, coalesced
from thinwire.common.dtypes import is_averaged, refuse_meta, refuse_unfit
from thinwire.common.messages import say
from thinwire.data import Batch, Shard
from thinwire.errors import UsageError
from thinwire.exchange.parameters import kept_buffers
from thinwire.optim import OptimizerFactory
from thinwire.strategies.learner import Loss, Recipe
from thinwire.surgery.meta import refuse_moved_to_meta


class Strategy(Protocol):
    """A way to train one model on many ranks."""

    shard: Shard  # which part of each batch this rank reads
    allows_uneven: bool = False  # whether ranks may have different numbers of batches in an epoch
    sees_loss: bool = True  # whether the losses that `step` returns on this rank are the whole model's

    def begin_epoch(self, num_steps: int | None) -> None:
        """An epoch begins, of so many steps if that is known."""

    def step(self, batch: Batch) -> Tensor:
        """One local update and whatever communication is due; returns this rank's loss."""

    def skip_step(self) -> None:
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

    def eval_model(self) -> nn.Module:
        """The whole trained model to run in eval mode, by all ranks equally often. Collective."""
        return self.consolidate()

    def exits(self) -> list[nn.Module]:
        """Models that end earlier than the whole one, shortest first, where the strategy has any. Collective."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on exactly."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


def replicate(model: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's parameters and buffers; say so if they were not equal."""
    refuse_meta(model)
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in tensors]
    with comm.ledger.purpose("start"):
        coalesced(tensors, comm.broadcast)
        tell_if_changed(before, tensors, comm)


def tell_if_changed(before: Sequence[Tensor], after: Sequence[Tensor], comm: Comm) -> None:
    """Say how many ranks do not begin with the weights that they were given. Collective."""
    changed = not all(torch.equal(old, new) or old.isnan().any() for old, new in zip(before, after, strict=True))
    others = int(torch.cat(comm.all_gather(torch.tensor([changed], dtype=torch.uint8))).sum())
    if others:
        say(f"the model differed between ranks; {others} of {comm.size} now begin with rank 0's weights", comm.rank)


def average_buffers(model: nn.Module, comm: Comm) -> None:
    """Make buffers equal on all ranks: the mean of floating-point and complex ones, rank 0's value of the others.

    Only those that are part of the model's state: the others are caches that every rank computes for itself.
    """
    buffers = kept_buffers(model)
    with comm.ledger.purpose("sync", instead_of="train"):
        coalesced([b for b in buffers if is_averaged(b)], comm.mean)
        coalesced([b for b in buffers if not is_averaged(b)], comm.broadcast)


def consolidated(model: nn.Module, comm: Comm, apart: Sequence[str] = ()) -> nn.Module:
    """A copy of a model, equal on all ranks: the mean of those parameters that may differ between them."""
    whole = copy.deepcopy(model)
    with comm.ledger.purpose("sync", instead_of="train"):
        coalesced([whole.get_parameter(name) for name in apart], comm.mean)
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

    `optimizer` is a factory because some strategies make parameters in mid-run. `schedule` maps a step to a factor of
    the learning rate that the optimizer has; torch's schedulers may set that too. `epochs` is how many there will be,
    for strategies that have phases. All ranks start from rank 0's weights.

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
    _check_schedule(schedule)
    _check_model(model)
    refuse_moved_to_meta(model)
    refuse_unfit(model, "prepare")
    recipe = Recipe(_checked(loss), optimizer, schedule, clip_norm, accumulate, autocast, epochs)
    strategy: Strategy = registry.build("strategies", spec, model, recipe, comm)
    return strategy


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={model!r}; give a module, as torch.nn.Linear(20, 2)")
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        raise UsageError(
            "model is wrapped in DistributedDataParallel, which would average gradients a second time; give the model "
            "in it, model.module, or keep the DDP and your loop: tw.attach"
        )


def _checked(loss: Loss) -> Loss:
    """The same loss, but what is no tensor is refused by name."""

    def checked(output: Any, targets: Tensor) -> Tensor:
        found = loss(output, targets)
        if not isinstance(found, Tensor):
            raise UsageError(
                f"the loss ({getattr(loss, '__name__', loss)}) returned a {type(found).__name__}; return the mean over "
                "the batch as a tensor, without .item()"
            )
        return found

    return checked


def _check_schedule(schedule: Callable[[int], float]) -> None:
    """Refuse what is no function from steps to factors: before the first step."""
    try:
        wrong = None if math.isfinite(schedule(0)) else f"schedule(0) is {schedule(0)}"
    except Exception as error:
        wrong = f"schedule(0) fails ({type(error).__name__}: {error})"
    if wrong:
        raise UsageError(
            f"schedule={schedule!r}, but {wrong}; give a function from a step to a factor of the learning rate, as "
            "lambda step: 0.99**step. To use one of torch's schedulers, make it in the optimizer factory, for the "
            "optimizer that the factory returns, and call its step() after the trainer's"
        )
