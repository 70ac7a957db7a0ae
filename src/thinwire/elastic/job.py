"""What is trained in an elastic run; equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, nn
from torch.utils.data import Dataset, default_collate

from thinwire import registry
from thinwire.data import Batch
from thinwire.errors import UsageError
from thinwire.losses import Loss
from thinwire.optim import OptimizerFactory, Schedule
from thinwire.spec import parse
from thinwire.strategies.local_sgd import Periodic


def constant(done: float, total: float) -> float:
    """The schedule of a constant learning rate."""
    return 1.0


def as_it_is(batch: Batch, generator: Generator) -> Batch:
    """The transform that changes nothing."""
    return batch


@dataclass(frozen=True)
class Job:
    """What is trained; equal on all members."""

    strategy: str  # a spec: local_sgd or diloco
    model: Callable[[], nn.Module]
    dataset: Dataset[Any]  # map-style
    loss: Loss | None
    optimizer: OptimizerFactory
    batch_size: int  # samples of a member in each local step
    epochs: int
    schedule: Schedule = constant  # (epochs done, epochs in total) → factor of the learning rate
    seed: int = 0
    clip_norm: float | None = None
    accumulate: int = 1
    autocast: bool = False
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Batch] = default_collate
    transform: Callable[[Batch, Generator], Batch] = as_it_is  # augmentation, on the device
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def refuse_others(spec: str) -> None:
    """Raise UsageError for a strategy whose ranks cannot leave and join between rounds."""
    named = parse(spec)
    kind, possible = registry.load("strategies", named.name), []
    for name in registry.TABLE["strategies"]:
        if issubclass(registry.load("strategies", name), Periodic):
            possible.append(name)
    if issubclass(kind, Periodic):
        return
    why = (
        "its nodes exchange gradients inside in every step, and a node that loses a rank would have to go on with fewer"
        if named.name == "daso"
        else "its ranks meet in every step, or each has a part of the model"
    )
    raise UsageError(f"elastic: {named.name} cannot go on when a rank leaves: {why}; possible: {', '.join(possible)}")
