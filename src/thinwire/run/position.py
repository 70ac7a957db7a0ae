"""The position of a run (epoch, batch, step, …), and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from thinwire.comm.base import Comm
from thinwire.errors import RunError, ThinwireError, one_line
from thinwire.run.checkpoint import READ_ERRORS, Checkpoints
from thinwire.run.meters import Meters
from thinwire.run.records import RunFolder
from thinwire.run.states import random_state, set_random_state
from thinwire.run.step_losses import PartSum
from thinwire.strategies.base import Strategy
from thinwire.tasks.metrics import Metric


@dataclass(frozen=True)
class Position:
    """How far a run has come. With the states of strategy and random generators, it can continue exactly."""

    epoch: int = 0
    batch: int = 0  # the next batch of this epoch
    first_batch: int = 0  # of what the strategy takes for this epoch; not 0 after a run that --steps ended in mid-epoch
    step: int = 0
    samples: int = 0  # that all ranks together have trained on
    loss_sum: float = 0.0  # over this epoch's batches, on this rank
    part_sums: dict[str, float] = field(default_factory=dict)  # the same for further numbers that the loss returned
    part_steps: dict[str, int] = field(default_factory=dict)  # in which it returned them; earlier versions lack it
    unlogged_loss: float = 0.0  # over the steps since the last one that was logged, on this rank
    unlogged_steps: int = 0
    value: float | None = None  # the metric after the last complete epoch; None if it was not tested
    best: float | None = None  # metric so far
    seconds: float = 0.0
    train_seconds: float = 0.0
    epochs_seconds: float = 0.0  # rank 0's train_seconds at the end of the last epoch; equal on all ranks

    @property
    def begun_epochs(self) -> int:
        """Epochs that are done, and one more if --steps ended the last one in its middle."""
        return self.epoch + (self.batch > 0)

    def with_losses(self, total: float, num_steps: int, parts: Mapping[str, PartSum]) -> Position:
        """This position with the losses of so many further steps, and sums of what the loss returned beside them."""
        sums = {name: self.part_sums.get(name, 0.0) + part.total for name, part in parts.items()}
        steps = {name: self.part_steps.get(name, 0) + part.num_steps for name, part in parts.items()}
        return replace(
            self, loss_sum=self.loss_sum + total, part_sums=self.part_sums | sums, part_steps=self.part_steps | steps,
            unlogged_loss=self.unlogged_loss + total, unlogged_steps=self.unlogged_steps + num_steps,
        )  # fmt: skip

    def tested(self, value: float | None, metric: Metric) -> Position:
        """This position with the metric of the model there; None if it was not tested. The best is NaN if all are."""
        known = [one for one in (self.best, value) if one is not None]
        numbers = [one for one in known if not math.isnan(one)] or known
        return replace(self, value=value, best=(max if metric.higher_is_better else min)(numbers, default=None))


def run_state(at: Position, seconds: float, strategy: Strategy, meters: Meters) -> dict[str, Any]:
    """The content of a checkpoint."""
    return {
        "strategy": strategy.state_dict(),
        "random": random_state(),
        "position": asdict(replace(at, seconds=seconds)),
        "meters": meters.state_dict(),
    }


def load_newest_checkpoint(
    checkpoints: Checkpoints, strategy: Strategy, meters: Meters, folder: RunFolder, comm: Comm,
    check: Callable[[Position], None],
) -> Position | None:  # fmt: skip
    """Load the newest checkpoint that all ranks have; returns its position, or None if there is none. Collective.

    `check` raises UsageError if the run cannot go on from a position.
    """
    meters_before = meters.state_dict()
    found = checkpoints.load_latest()
    step, state = found or (0, {})
    at = Position() if found is None else _position(step, state)
    check(at)
    if comm.rank == 0:
        folder.drop_rows_after(step)
    if found is None:
        meters.load_state_dict(meters_before)
        return None
    try:
        strategy.load_state_dict(state["strategy"])
        set_random_state(state["random"])
        meters.load_state_dict(state["meters"])
    except ThinwireError:
        raise
    except READ_ERRORS as error:
        raise _misfit(step, error) from error
    return at


def _position(step: int, state: Any) -> Position:
    try:
        at = TypeAdapter(Position).validate_python(state["position"])
        if at.step != step or min(at.epoch, at.batch, at.first_batch, at.samples) < 0:
            raise ValueError(f"its position is step {at.step}, epoch {at.epoch}, batch {at.batch}")
    except READ_ERRORS as error:
        raise _misfit(step, error) from error
    return at


def _misfit(step: int, error: BaseException) -> RunError:
    why = one_line(f"{type(error).__name__}: {error}")
    return RunError(
        f"the checkpoint of step {step} does not fit this run ({why}); remove its folder to go on from the one before"
    )
