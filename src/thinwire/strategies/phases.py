"""The phases of AB-training as plain data: which step belongs to which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinwire.errors import UsageError

Phase = Literal["warmup", "ab", "rebound"]
# The authors' VGG16 on CIFAR-10 ran 150 epochs of 48 steps with S = 759, D = 60, R = 267.
SYNC_SHARE = 759 / 7200  # S as a part of the run
REBOUND_SHARE = 60 / 759  # D as a part of S
CLIMB_SHARE = 267 / 759  # R as a part of S
WARMUP_SYNCS = 2  # Wu as a multiple of S; theirs was 5.7, which leaves most of the traffic as it is


@dataclass(frozen=True)
class Phases:
    """Which phase each step belongs to: Wu, S, D and R of the paper, in steps.

    >>> Phases(warmup=4330, every=759, rebound=60, climb=267).starts(5400)
    [(0, 'warmup'), (4330, 'ab'), (4554, 'rebound'), (4614, 'ab'), (5313, 'rebound'), (5373, 'ab')]
    """

    warmup: int  # full rank, before the first factors
    every: int  # groups meet at each multiple of so many steps
    rebound: int  # full rank, after they have met
    climb: int  # until the learning rate is back at its schedule, after each change of phase

    def at(self, step: int) -> Phase:
        """The phase that a step, counted from 0, belongs to."""
        met = step // self.every * self.every
        if step < self.warmup:
            return "warmup"
        return "rebound" if met > self.warmup and step < met + self.rebound else "ab"

    def starts(self, num_steps: int) -> list[tuple[int, Phase]]:
        """The first step of every phase of a run."""
        phases = [self.at(step) for step in range(num_steps)]
        return [(i, phase) for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]

    @property
    def first_meeting(self) -> int:
        """The first step after groups have met."""
        return (self.warmup // self.every + 1) * self.every

    def ease(self, step: int, began: int) -> float:
        """How far the learning rate has climbed back to its schedule, from 0 to 1, in a phase that began at a step."""
        return min(1.0, (step - began) / self.climb) if began and self.climb else 1.0


class Lengths(NamedTuple):
    """The lengths of phases as a user gives them, in steps or in epochs; what is left out follows from the others."""

    every: float | None = None
    warmup: float | None = None
    rebound: float | None = None
    climb: float | None = None
    unit: Literal["steps", "epochs"] = "steps"

    @property
    def in_steps(self) -> bool:
        """Whether nothing need be known of epochs."""
        return self.unit == "steps" and self.every is not None

    def _check(self) -> None:
        if self.unit == "epochs":
            return
        for name, length in zip(("sync_every", "warmup", "rebound", "climb"), self[:4], strict=True):
            if length is not None and length != round(length):
                raise UsageError(f"ab: {name}={length} steps; give a whole number, or ab({name}={length}, unit=epochs)")
        if self.every == 1:
            raise UsageError("ab: sync_every=1 leaves no step for groups to train apart; try 20 or more")

    def phases(self, epochs: int | None, epoch_steps: int) -> Phases:
        """In steps, for a run of so many epochs of so many steps; at least a step each.

        >>> Lengths().phases(epochs=10, epoch_steps=100)
        Phases(warmup=210, every=105, rebound=8, climb=37)
        >>> Lengths(every=2, warmup=3, unit="epochs").phases(epochs=10, epoch_steps=100)
        Phases(warmup=300, every=200, rebound=16, climb=70)
        """
        self._check()

        def steps(length: float | None, default: float, least: int) -> int:
            scale = epoch_steps if self.unit == "epochs" else 1
            return max(least, round(default if length is None else length * scale))

        total = (epochs or 0) * epoch_steps
        every = steps(self.every, total * SYNC_SHARE, least=2)
        warmup = every * WARMUP_SYNCS if self.every else min(every * WARMUP_SYNCS, total / 2)
        rebound = steps(self.rebound, every * REBOUND_SHARE, least=1)
        climb = steps(self.climb, every * CLIMB_SHARE, least=0)
        phases = Phases(steps(self.warmup, warmup, least=0), every, rebound, climb)
        if phases.rebound >= phases.every:
            raise UsageError(
                f"ab: a rebound of {phases.rebound} steps leaves nothing of the {phases.every} between two meetings; "
                "try a shorter rebound, or a longer sync_every"
            )
        if total and phases.warmup >= total:
            raise UsageError(
                f"ab: the warm-up of {phases.warmup} steps is not shorter than the run of {total} ({epochs} epochs of "
                f"{epoch_steps}); try warmup={_fifth(total, epoch_steps, self.unit)}, more epochs, or leave it out"
            )
        return phases


def _fifth(total: int, epoch_steps: int, unit: str) -> str:
    return f"{total // 5}" if unit == "steps" else f"{total / epoch_steps / 5:.2g} (epochs)"
