"""The recipe of each part of a sequence: its epochs, its learning rates and the optimizer that it begins with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.errors import UsageError
from thinwire.optim import OptimizerFactory, has_scheduler
from thinwire.strategies.learner import Recipe
from thinwire.strategies.sequence_parts import Part
from thinwire.surgery.low_rank_model import LowRankLayers

Schedule = Literal["run", "part"]


class Seam(NamedTuple):
    """How a part began after the one before it."""

    steps_before: int = 0  # of all earlier parts
    climb: int = 0  # steps in which the learning rate climbs, because the optimizer began anew
    layers: LowRankLayers = LowRankLayers({}, [])  # of the model that it got


def recipe_of(part: Part, seam: Seam, run: Recipe, schedule: Schedule) -> Recipe:
    """The recipe of a run, with the epochs and the learning rates of a part."""
    return replace(run, epochs=part.epochs, schedule=_schedule(part.epochs, seam, run, schedule))


def _schedule(epochs: int | None, seam: Seam, run: Recipe, schedule: Schedule) -> Callable[[int], float]:
    """From a step of a part to a factor of the learning rate.

    "run": the factor of the same step of the run. "part": the whole schedule in the time of the part; if a length is
    not known, its beginning.
    """
    before, pace = (seam.steps_before, 1.0) if schedule == "run" else (0, (run.epochs or 1) / (epochs or 1))

    def factor(step: int) -> float:
        climbed = min(1.0, (step + 1) / (seam.climb + 1))
        return climbed * run.schedule(before + int((step + 0.5) * pace))

    return factor


class OnlyOptimizers:
    """An optimizer factory that refuses what a new optimizer would lose: a scheduler, or a learning rate that was set.

    Each part of a sequence makes a new optimizer; only a sequence of one part may have a scheduler.
    """

    def __init__(self, factory: OptimizerFactory, may_have_scheduler: bool = False) -> None:
        self.factory, self.may_have_scheduler = factory, may_have_scheduler

    def __call__(self, parameters: Iterable[Parameter]) -> Optimizer:
        made = self.factory(parameters)
        if has_scheduler(made) and not self.may_have_scheduler:
            raise UsageError(
                "the optimizer factory makes a learning-rate scheduler, but each part has a new optimizer, and the "
                "scheduler would start again; give prepare a schedule instead, as schedule=lambda step: 0.99**step"
            )
        self.last, self.first_lrs = weakref.ref(made), [group["lr"] for group in made.param_groups]
        return made

    def refuse_changed_lr(self) -> None:
        """Raise UsageError if the learning rate was changed in the optimizer that was made last."""
        last = self.last()
        now = self.first_lrs if last is None else [group["lr"] for group in last.param_groups]
        if now != self.first_lrs:
            raise UsageError(
                f"the optimizer's learning rate is {now[0]} now, but it was made with {self.first_lrs[0]}; the next "
                "part makes a new optimizer, and the change would be lost. Give prepare a schedule instead, as "
                "schedule=lambda step: 0.99**step"
            )
