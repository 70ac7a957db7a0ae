"""How long a run is, in epochs and steps, and what is due after each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.config import RunConfig, parse_every
from thinwire.errors import UsageError
from thinwire.optim import Schedule
from thinwire.run.position import Position


@dataclass(frozen=True)
class Length:
    """The length of a run, given in epochs or in steps.

    >>> length = Length(epochs=None, steps=250, epoch_steps=100)
    >>> length.num_epochs, length.epoch_length(Position(epoch=2, step=200))
    (3, 50)
    """

    epochs: int | None  # None = as many as the steps take
    steps: int | None  # None = as many as the epochs have
    epoch_steps: int | None  # None = unknown: the data is a stream without a length

    def __post_init__(self) -> None:
        if self.epoch_steps is None and self.steps is None:
            raise UsageError(
                f"--epochs {self.epochs}, but the training data is a stream without a length, so nobody knows how long "
                "the run is; give --steps, or give the dataset a __len__"
            )

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        assert self.epoch_steps is not None
        return self.epochs * self.epoch_steps

    @property
    def num_epochs(self) -> int | None:
        """Epochs in all, with one that is cut short; None if that is unknown."""
        if self.steps is None or self.epoch_steps is None:
            return self.epochs
        return math.ceil(self.steps / self.epoch_steps)

    def is_reached(self, at: Position) -> bool:
        """Whether nothing is left to train."""
        return at.epoch >= (self.epochs or 0) if self.steps is None else at.step >= self.steps

    def epoch_length(self, at: Position) -> int | None:
        """The number of steps of this epoch, which may be cut short; None if it is unknown."""
        if self.epoch_steps is None:
            return None
        return min(self.epoch_steps, self.num_steps - at.step + at.batch)

    def schedule(self, factor: Schedule) -> Callable[[int], float]:
        """From a step to the factor of the learning rate at its middle. A stream without a length is one epoch."""
        in_epoch = self.epoch_steps or self.num_steps
        total = self.num_steps / in_epoch
        return lambda step: factor((step + 0.5) / in_epoch, total)

    def refuse_less_than(self, at: Position) -> None:
        """Raise UsageError if more is done already."""
        if self.steps is not None and at.step > self.steps:
            raise UsageError(
                f"--steps {self.steps}, but {at.step} are done already; give more steps, or leave --steps out"
            )
        if self.steps is None and (at.epoch, at.batch) > (self.epochs or 0, 0):
            done = f"{at.epoch} epochs and {at.batch} steps"
            raise UsageError(
                f"--epochs {self.epochs}, but {done} are done already; give more epochs, or leave --epochs out"
            )


class Due(NamedTuple):
    """What is to be done after a step."""

    checkpoint: bool = False
    test: bool = False
    log: bool = False

    @property
    def has_row(self) -> bool:
        return self.test or self.log


def due_after(config: RunConfig, at: Position, is_epoch_end: bool) -> Due:
    """What is due after the last step of a position. A checkpoint is saved at the end of an epoch anyway."""

    def is_multiple(number: int, every: int) -> bool:
        return every > 0 and number % every == 0

    number, unit = parse_every(config.test_every)
    return Due(
        checkpoint=not is_epoch_end and is_multiple(at.step, config.checkpoint_every),
        test=is_multiple(at.step, number) if unit == "steps" else is_epoch_end and is_multiple(at.epoch + 1, number),
        log=is_multiple(at.step, config.log_every),
    )
