"""The recipe of each part of a sequence: its epochs, its learning rates and the optimizer that it begins with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.common.messages import say
from thinwire.optim import OptimizerFactory, learning_rates, refuse_changed_lr, refuse_scheduler
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.sequence_parts import Part
from thinwire.surgery.low_rank_model import LowRankLayers

Schedule = Literal["run", "part", "restart"]


class Seam(NamedTuple):
    """How a part began after the one before it."""

    steps_before: int = 0  # of all earlier parts
    climb: int = 0  # steps in which the learning rate climbs, because the optimizer began anew
    layers: LowRankLayers = LowRankLayers({}, [])  # of the model that it got


def recipe_of(part: Part, seam: Seam, run: Recipe, schedule: Schedule, is_last: bool) -> Recipe:
    """The recipe of a run, with the epochs and the learning rates of a part."""
    is_whole = schedule == "part" or (schedule == "restart" and is_last)
    pace = run.epochs / part.epochs if is_whole and run.epochs and part.epochs else 1.0
    steps = run.steps - seam.steps_before if is_last and run.steps is not None else None
    return replace(
        run,
        epochs=part.epochs,
        steps=steps,
        schedule=_schedule(run, seam, seam.steps_before if schedule == "run" else 0, pace),
    )


def _schedule(run: Recipe, seam: Seam, before: int, pace: float) -> Callable[[int], float]:
    """From a step of a part to a factor of the learning rate: that of the run after `before` steps, at some pace."""

    def factor(step: int) -> float:
        climbed = min(1.0, (step + 1) / (seam.climb + 1))
        return climbed * run.schedule(before + int((step + 0.5) * pace))

    return factor


class OptimizerWatch:
    """An optimizer factory that remembers the last optimizer: each part of a sequence makes a new one.

    What would be lost with the last one, a scheduler or a learning rate that was set in it, is refused.
    """

    def __init__(self, factory: OptimizerFactory, may_have_scheduler: bool = False) -> None:
        self.factory, self.may_have_scheduler = factory, may_have_scheduler
        self._last: Callable[[], Optimizer | None] = lambda: None
        self._first_lrs: list[float] = []

    def __call__(self, parameters: Iterable[Parameter]) -> Optimizer:
        made = self.factory(parameters)
        if not self.may_have_scheduler:
            refuse_scheduler(made, "sequence")
        self._last, self._first_lrs = weakref.ref(made), learning_rates(made)
        return made

    def refuse_changed_lr(self) -> None:
        """Raise UsageError if the learning rate of the last optimizer is no longer that with which it was made."""
        last = self._last()
        if last is not None:
            refuse_changed_lr(learning_rates(last), self._first_lrs, "sequence")


def say_if_in_first_epoch(num_steps: int, rank: int) -> None:
    """Tell the user if steps were done and no epoch has ended: then no seam was reached."""
    if num_steps:
        say(
            f"sequence has done {num_steps} steps and is still in its first epoch; call trainer.end_epoch() after each "
            "epoch, or loop over tw.epoch",
            rank,
            once=True,
        )
