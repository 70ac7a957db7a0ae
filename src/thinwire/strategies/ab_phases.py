"""The phases of AB-training as plain data: which step belongs to which phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from thinwire.common.messages import say
from thinwire.errors import UsageError

Phase = Literal["warmup", "ab", "rebound", "joint"]
Length = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LengthOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# The authors' VGG16 on CIFAR-10 ran 150 epochs of 48 steps with S = 759, D = 60, R = 267.
SYNC_SHARE = 759 / 7200  # S as a part of the run
REBOUND_SHARE = 60 / 759  # D as a part of S
CLIMB_SHARE = 267 / 759  # R as a part of S
JOINT_SHARE = 0.5  # length of the joint phase, as a part of what the warm-up leaves; chosen on held-out data
WARMUP_SYNCS = 2  # Wu as a multiple of S; the authors' 5.7 would send most of the bytes of data parallelism


@dataclass(frozen=True)
class Phases:
    """Which phase each step belongs to: Wu, S, D and R of the paper, in steps.

    >>> Phases(warmup=4330, every=759, rebound=60, climb=267).starts(5400)
    [(0, 'warmup'), (4330, 'ab'), (4554, 'rebound'), (4614, 'ab'), (5313, 'rebound'), (5373, 'ab')]
    >>> Phases(warmup=20, every=10, rebound=1, climb=3, joint_start=35).starts(50)
    [(0, 'warmup'), (20, 'ab'), (30, 'rebound'), (31, 'ab'), (35, 'joint')]
    """

    warmup: int  # Wu: steps at full rank before the first factors
    every: int  # S: groups sync before each step that is a multiple of this
    rebound: int  # D: steps at full rank after a sync
    climb: int  # R: steps of learning-rate warm-up after each change of phase
    joint_start: int | None = None  # from this step on all ranks train both factors together; None = never

    def at(self, step: int) -> Phase:
        """The phase of a step; steps count from 0."""
        if self.joint_start is not None and step >= self.joint_start:
            return "joint"
        if step < self.warmup:
            return "warmup"
        last_sync = step // self.every * self.every
        return "rebound" if last_sync > self.warmup and step < last_sync + self.rebound else "ab"

    def starts(self, num_steps: int) -> list[tuple[int, Phase]]:
        """The first step of every phase of a run."""
        phases = [self.at(step) for step in range(num_steps)]
        return [(i, phase) for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]

    def say_if_no_sync(self, num_steps: int, rank: int) -> None:
        """Tell the user if a run is too short for a sync before its end. A joint phase begins with one."""
        if (
            self.joint_start is None and 0 < num_steps <= (self.warmup // self.every + 1) * self.every
        ):  # the step of the first sync
            say(
                f"ab: groups sync every {self.every} steps, but the run has {num_steps} steps, so they sync only at "
                "its end; a shorter sync_every makes them sync during the run",
                rank,
                once=True,
            )

    def lr_warmup(self, step: int, phase_start: int) -> float:
        """How much of the learning-rate warm-up is done, from 0 to 1. The first phase of a run has none."""
        return min(1.0, (step - phase_start) / self.climb) if phase_start and self.climb else 1.0


def say_if_unplanned(num_steps: int, rank: int) -> None:
    """Tell the user if steps were trained before the phases could be planned."""
    if num_steps:
        say(
            f"ab does not know how long an epoch is after {num_steps} steps, so it trains at full rank; write "
            "`for batch in tw.epoch(trainer, batches, comm)`, or give ab(sync_every=…) in steps",
            rank,
            once=True,
        )


class PhaseLengths(NamedTuple):
    """The lengths of phases as a user gives them, in steps or epochs. None = a default that follows from the run."""

    every: float | None = None
    warmup: float | None = None
    rebound: float | None = None
    climb: float | None = None
    joint: float | None = None
    unit: Literal["steps", "epochs"] = "steps"

    def phases_before_first_epoch(self, epochs: int | None, steps: int | None = None) -> Phases | None:
        """The phases if all lengths are in steps; None if they depend on the length of an epoch."""
        if steps is not None and self.unit == "steps":
            return self.phases(epochs, 0, steps)
        if epochs is None and self.joint:
            raise UsageError(
                f"ab: joint={self.joint:g} is the length of the last phase, so ab must know how long the run is: "
                "prepare(…, epochs=90), and tw.epoch(trainer, batches, comm) for each of them; or leave joint out"
            )
        if self.unit == "steps" and self.every is not None and not self.joint:
            return self.phases(None, 0)
        if epochs is None:
            raise UsageError(
                "ab has phases, so it must know how long the run is: prepare(…, epochs=90), and tw.epoch(trainer, "
                "batches, comm) for each of them; or give ab(sync_every=…) in steps"
            )
        return None

    def is_unplanned(self, phases: Phases | None, epochs: int | None) -> bool:
        """Whether the phases, or the joint one by default, are yet to be planned from the length of an epoch."""
        return phases is None or bool(epochs and self.joint is None and phases.joint_start is None)

    def phases(self, epochs: int | None, epoch_steps: int, steps: int | None = None) -> Phases:  # long: examples
        """The phases of a run of `epochs` epochs of `epoch_steps` steps, or of so many `steps`.

        >>> PhaseLengths().phases(epochs=10, epoch_steps=100)
        Phases(warmup=210, every=105, rebound=8, climb=37, joint_start=605)
        >>> PhaseLengths(every=2, warmup=3, joint=4, unit="epochs").phases(epochs=10, epoch_steps=100)
        Phases(warmup=300, every=200, rebound=16, climb=70, joint_start=600)
        """
        self._check_whole_steps()

        def in_steps(length: float | None, default: float, least: int) -> int:
            scale = epoch_steps if self.unit == "epochs" else 1
            return max(least, round(default if length is None else length * scale))

        total = (epochs or 0) * epoch_steps if steps is None else steps
        every = in_steps(self.every, total * SYNC_SHARE, least=2)
        warmup = every * WARMUP_SYNCS if self.every else min(every * WARMUP_SYNCS, total / 2)
        rebound = in_steps(self.rebound, every * REBOUND_SHARE, least=1)
        climb = in_steps(self.climb, every * CLIMB_SHARE, least=0)
        warmup = in_steps(self.warmup, warmup, least=0)
        joint = in_steps(self.joint, max(0, total - warmup) * JOINT_SHARE, least=0)
        if rebound >= every:
            raise UsageError(
                f"ab: a rebound of {rebound} steps leaves none of the {every} steps between two syncs; try a shorter "
                "rebound, or a longer sync_every"
            )
        run = f"the run of {total}" + (f" ({epochs} epochs of {epoch_steps})" if steps is None else "")
        fifth = _fifth(total, epoch_steps, self.unit)
        if total and warmup >= total:
            raise UsageError(
                f"ab: the warm-up of {warmup} steps is not shorter than {run}; try warmup={fifth}, more epochs, or "
                "leave it out"
            )
        if total and warmup + joint > total:
            raise UsageError(
                f"ab: the warm-up of {warmup} steps and the joint phase of {joint} are longer than {run}; try "
                f"joint={fifth}, more epochs, or leave it out"
            )
        return Phases(warmup, every, rebound, climb, total - joint if joint else None)

    def _check_whole_steps(self) -> None:
        if self.unit == "epochs":
            return
        for name, length in zip(("sync_every", "warmup", "rebound", "climb", "joint"), self[:5], strict=True):
            if length is not None and length != round(length):
                raise UsageError(f"ab: {name}={length} steps; give a whole number, or ab({name}={length}, unit=epochs)")
        if self.every == 1:
            raise UsageError("ab: sync_every=1 leaves no step in which groups train separately; try 20 or more")


def _fifth(total: int, epoch_steps: int, unit: str) -> str:
    """A fifth of a run, in the user's unit."""
    return f"{total // 5}" if unit == "steps" else f"{total / epoch_steps / 5:.2g} (epochs)"
