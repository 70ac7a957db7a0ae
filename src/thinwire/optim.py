"""Optimizers and learning-rate schedules, by the names that specs use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire import registry
from thinwire.errors import UsageError

OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]
Schedule = Callable[[float, float], float]  # (epochs done, epochs in total) → factor of the learning rate
WARMUP_START_LR = 1e-5  # where a learning-rate warm-up begins
Fraction = Annotated[float, Field(ge=0, lt=1)]


def sgd(
    lr: float,
    /,
    *,
    momentum: Fraction = 0.9,  # higher = longer memory of past gradients
    nesterov: bool = False,  # true = Nesterov momentum
    weight_decay: NonNegativeFloat = 0.0,  # higher = smaller weights
) -> OptimizerFactory:
    """Stochastic gradient descent with momentum."""
    if nesterov and not momentum:
        raise UsageError("sgd: nesterov=True needs momentum above 0; try momentum=0.9")

    def make(parameters: Iterable[Parameter]) -> Optimizer:
        options: dict[str, Any] = {"weight_decay": weight_decay, "nesterov": nesterov}
        return torch.optim.SGD(given := list(parameters), lr, momentum, **options, fused=_can_fuse(given))

    return make


def adamw(
    lr: float,
    /,
    *,
    beta1: Fraction = 0.9,  # higher = longer memory of past gradients
    beta2: Fraction = 0.999,  # higher = longer memory of their squares
    weight_decay: NonNegativeFloat = 0.01,  # higher = smaller weights
) -> OptimizerFactory:
    """Adam with decoupled weight decay."""

    def make(parameters: Iterable[Parameter]) -> Optimizer:
        given = list(parameters)
        return torch.optim.AdamW(given, lr, (beta1, beta2), weight_decay=weight_decay, fused=_can_fuse(given))

    return make


def build_optimizer(spec: str, lr: float) -> OptimizerFactory:
    """The factory that a spec names: a registered one, or the user's own function of (parameters, lr).

    >>> build_optimizer("torch.optim:RAdam(weight_decay=0.1)", 0.01)([Parameter(torch.zeros(1))]).defaults["lr"]
    0.01
    """
    if not registry.is_own(spec):
        built: OptimizerFactory = registry.build("optimizers", spec, lr)
        return built
    own = registry.load_own("optimizer", spec, ("parameters", "lr"), "a torch.optim.Optimizer")

    def make(parameters: Iterable[Parameter]) -> Optimizer:
        made = own.function(list(parameters), lr, **own.options)
        if not isinstance(made, Optimizer):
            raise UsageError(f"optimizer '{spec}' returned {type(made).__name__}; expected a torch.optim.Optimizer")
        return made

    return make


class LearningRateWatch:
    """An optimizer factory that notes the learning rate of the last step of any optimizer that it made."""

    def __init__(self, factory: OptimizerFactory) -> None:
        self.factory = factory
        self.last: float | None = None  # of the first parameter group

    def __call__(self, parameters: Iterable[Parameter]) -> Optimizer:
        made = self.factory(parameters)
        made.register_step_pre_hook(self._note)
        return made

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self.last = float(optimizer.param_groups[0]["lr"])


def _can_fuse(parameters: list[Parameter]) -> bool | None:
    """Whether one kernel can update all parameters: on a GPU. None leaves it to torch, as before."""
    return True if all(p.is_cuda and p.is_floating_point() for p in parameters) else None


def constant(
    *,
    warmup_epochs: NonNegativeFloat = 0.0,  # epochs in which the learning rate rises linearly from 0
) -> Schedule:
    """A constant learning rate, after an optional linear warm-up."""
    return lambda done, total: _warmup_factor(done, warmup_epochs)


def cosine(
    *,
    warmup_epochs: NonNegativeFloat = 0.0,  # epochs in which the learning rate rises linearly from 0
    floor: Fraction = 0.0,  # learning rate at the end, as a share of the full one
) -> Schedule:
    """Half a cosine from 1 down to the floor: floor + (1 − floor)·½(1 + cos πt), after an optional linear warm-up."""

    def factor(done: float, total: float) -> float:
        t = min(1.0, max(0.0, done - warmup_epochs) / max(total - warmup_epochs, 1e-9))
        return _warmup_factor(done, warmup_epochs) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * t)))

    return factor


def _warmup_factor(done: float, warmup_epochs: float) -> float:
    return min(1.0, done / warmup_epochs) if warmup_epochs else 1.0


@contextmanager
def scaled_lr(optimizer: Optimizer, factor: float, warmup: float = 1.0) -> Iterator[None]:
    """Inside, learning rates are scaled; afterwards they are what torch's scheduler or the user set.

    `warmup` goes from 0 (WARMUP_START_LR) to 1 (the learning rate times `factor`).
    """
    unscaled = [(group, group["lr"]) for group in optimizer.param_groups]
    for group, lr in unscaled:
        group["lr"] = warmup * lr * factor + (1 - warmup) * min(lr * factor, WARMUP_START_LR)
    try:
        yield
    finally:
        for group, lr in unscaled:
            group["lr"] = lr


def learning_rates(optimizer: Optimizer) -> list[float]:
    """The learning rate of each parameter group."""
    return [group["lr"] for group in optimizer.param_groups]


def refuse_scheduler(optimizer: Optimizer, owner: str) -> None:
    """Raise UsageError if one of torch's schedulers was made for an optimizer that `owner` will replace.

    A scheduler stores the first learning rate in the optimizer.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            f"{owner}: the optimizer factory makes a learning-rate scheduler, but this strategy makes a new optimizer "
            "in mid-run, and the scheduler would start again; give prepare a schedule instead, as schedule=lambda "
            "step: 0.99**step"
        )


def refuse_changed_lr(now: list[float], first: list[float], owner: str) -> None:
    """Raise UsageError if learning rates differ from those with which an optimizer was made that `owner` replaces."""
    if now != first:
        raise UsageError(
            f"{owner}: the optimizer's learning rate is {now[0]} now, but it was made with {first[0]}; {owner} makes a "
            "new optimizer, and the change would be lost. Give prepare a schedule instead, as schedule=lambda step: "
            "0.99**step"
        )
