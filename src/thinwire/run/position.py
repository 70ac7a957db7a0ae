"""Where a run is, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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
    """Where a run is: with the states of strategy and random generators, enough to go on exactly."""

    epoch: int = 0
    batch: int = 0  # the next one of this epoch
    step: int = 0
    samples: int = 0  # trained on, by all ranks
    loss_sum: float = 0.0  # over this epoch's batches, on this rank
    value: float | None = None  # the metric after the last whole epoch
    best: float | None = None
    seconds: float = 0.0
    train_seconds: float = 0.0
    epochs_seconds: float = 0.0  # rank 0's training time at the end of the last epoch: what all ranks agree on


def state_of_run(at: Position, seconds: float, strategy: Strategy, meters: Meters) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {
        "strategy": strategy.state_dict(),
        "random": random_state(),
        "position": asdict(replace(at, seconds=seconds)),
        "meters": meters.state_dict(),
    }


def load_position(
    checkpoints: Checkpoints, strategy: Strategy, meters: Meters, folder: RunFolder, comm: Comm, epochs: int
) -> Position | None:
    """Go on from the newest checkpoint that all ranks have; returns its position, or None. Collective."""
    before = meters.state_dict()
    found = checkpoints.load_latest()
    step, state = found or (0, None)
    at = Position(**state["position"]) if state else Position()
    if (at.epoch, at.batch) > (epochs, 0):
        done = f"{at.epoch} epochs and {at.batch} steps"
        raise UsageError(f"--epochs {epochs}, but {done} are done already; give more epochs or none")
    if comm.rank == 0:
        folder.forget_after(step)
    if state is None:
        meters.load_state_dict(before)
        return None
    _load(state, strategy, meters)
    return at


def _load(state: Mapping[str, Any], strategy: Strategy, meters: Meters) -> None:
    strategy.load_state_dict(state["strategy"])
    set_random_state(state["random"])
    meters.load_state_dict(state["meters"])  # as if never stopped
