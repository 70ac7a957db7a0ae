"""The position of a run (epoch, batch, step, …), and its checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from thinwire.comm.base import Comm
from thinwire.errors import UsageError
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.meters import Meters
from thinwire.run.records import RunFolder
from thinwire.run.states import random_state, set_random_state
from thinwire.strategies.base import Strategy


@dataclass(frozen=True)
class Position:
    """How far a run has come. With the states of strategy and random generators, it can continue exactly."""

    epoch: int = 0
    batch: int = 0  # the next batch of this epoch
    step: int = 0
    samples: int = 0  # that all ranks together have trained on
    loss_sum: float = 0.0  # over this epoch's batches, on this rank
    part_sums: dict[str, float] = field(default_factory=dict)  # the same for further numbers that the loss returned
    value: float | None = None  # the metric after the last complete epoch; None if it was not tested
    best: float | None = None  # metric so far
    seconds: float = 0.0
    train_seconds: float = 0.0
    epochs_seconds: float = 0.0  # rank 0's train_seconds at the end of the last epoch; equal on all ranks

    def tested(self, value: float | None, metric: str) -> Position:
        """This position with the metric of the model there; None if it was not tested."""
        known = [one for one in (self.best, value) if one is not None]
        return replace(self, value=value, best=(max if metric == "accuracy" else min)(known, default=None))


def run_state(at: Position, seconds: float, strategy: Strategy, meters: Meters) -> dict[str, Any]:
    """The content of a checkpoint."""
    return {
        "strategy": strategy.state_dict(),
        "random": random_state(),
        "position": asdict(replace(at, seconds=seconds)),
        "meters": meters.state_dict(),
    }


def load_newest_checkpoint(
    checkpoints: Checkpoints, strategy: Strategy, meters: Meters, folder: RunFolder, comm: Comm, epochs: int
) -> Position | None:
    """Load the newest checkpoint that all ranks have; returns its position, or None if there is none. Collective."""
    meters_before = meters.state_dict()
    found = checkpoints.load_latest()
    step, state = found or (0, None)
    at = Position(**state["position"]) if state else Position()
    if (at.epoch, at.batch) > (epochs, 0):
        done = f"{at.epoch} epochs and {at.batch} steps"
        raise UsageError(f"--epochs {epochs}, but {done} are done already; give more epochs, or leave --epochs out")
    if comm.rank == 0:
        folder.drop_rows_after(step)
    if state is None:
        meters.load_state_dict(meters_before)
        return None
    strategy.load_state_dict(state["strategy"])
    set_random_state(state["random"])
    meters.load_state_dict(state["meters"])
    return at
