"""Strategy: the interface of all methods to train on many ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.data import Batch, Loader, Shard
from thinwire.errors import UsageError
from thinwire.strategies.series import Series
from thinwire.surgery.low_rank_model import LowRankLayers
from thinwire.surgery.moments import OptimizerState


class Artifact(NamedTuple):
    """A further model that a strategy makes. A run tests it, writes it to a file and reports its size and metric."""

    name: str
    about: str  # what it is, in a sentence
    model: nn.Module
    file: str  # in the run's folder
    column: str = ""  # heading of a column in the report with its size; without one it has no column
    computes_the_same: bool = False  # as the consolidated model, with fewer parameters


def factored_artifact(model: nn.Module) -> Artifact:
    """The artifact of a model with low-rank layers."""
    about, file = "the trained model with low-rank layers as two thin ones", "model-factored.safetensors"
    return Artifact("factored", about, model, file, column="Factored model", computes_the_same=True)


class SmallModel(NamedTuple):
    """A model that computes what the consolidated one does, with fewer parameters."""

    model: nn.Module
    layers: LowRankLayers


class Strategy(ABC):
    """A method to train one model on many ranks.

    A subclass must define `step`, `consolidate`, `state_dict` and `load_state_dict`; otherwise the class statement
    raises TypeError. A class that leaves some of them to its subclasses says so: class Staged(Strategy, abstract=True).
    """

    shard: Shard  # which part of each batch this rank reads
    allows_uneven: bool = False  # whether ranks may have different numbers of batches in an epoch
    keeps_model: ClassVar[bool] = True  # whether ranks train the model as it is given; only then can it be compiled
    checks_targets: bool = False  # whether it reads the targets on the host in every step
    sees_loss: bool = True  # whether the losses that `step` returns on this rank are the whole model's
    steps_are_alike: bool = False  # whether it sends the same in every step, apart from the ends of an epoch
    has_phases: ClassVar[bool] = False  # whether epochs of a run differ in what they send
    makes_small_model: ClassVar[bool] = False  # whether `small_model` may return one
    series: ClassVar[Mapping[str, Series]] = {}  # how the report shows values of `status`
    timeline_epochs: Collection[int] = (0,)  # epochs in whose beginning a run records the timeline of some steps

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        needed = sorted(Strategy.__abstractmethods__)
        missing = [name for name in needed if getattr(getattr(cls, name), "__isabstractmethod__", False)]
        if missing and not abstract:
            raise TypeError(f"{cls.__name__} is a Strategy without {', '.join(missing)}; define them")

    def begin_epoch(self, num_steps: int | None) -> None:  # noqa: B027
        """Called before each epoch; `num_steps` is its number of steps, None if that is unknown."""

    def set_shard(self, loader: Loader) -> None:
        """Let a loader read this strategy's shard; called after begin_epoch(), because a sequence may change it."""
        if loader.shard != self.shard:
            loader.follow(self.shard)

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """Make one local update and whatever communication is due; returns this rank's loss."""

    @property
    def loss_parts(self) -> Mapping[str, Tensor]:
        """Further numbers that the loss returned in this rank's last step, by name."""
        source = getattr(self, "learner", None) or getattr(self, "strategy", None)  # none before a model is cut
        return {} if source is None else source.loss_parts

    def skip_step(self) -> None:
        """Called instead of step() when this rank has run out of batches; only if `allows_uneven`."""
        raise UsageError(f"{type(self).__name__} needs a batch on every rank in every step; loop over tw.epoch")

    def end_epoch(self) -> None:  # noqa: B027
        """Called after each epoch: makes parameters that differ between ranks equal. Collective."""

    def status(self) -> dict[str, Any]:
        """The state of the method as JSON values; a run records it after each epoch, and in its summary."""
        return {}

    @abstractmethod
    def consolidate(self) -> nn.Module:
        """A copy of the whole trained model, equal on every rank; training does not change it. Collective."""

    def eval_model(self) -> nn.Module:
        """The whole trained model for evaluation. All ranks must run it equally often. Collective."""
        return self.consolidate()

    def small_model(self) -> SmallModel | None:
        """A copy of the trained model with fewer parameters, equal on every rank, if there is one. Collective."""
        return None

    def optimizer_state(self) -> dict[str, OptimizerState] | None:
        """A copy of the optimizer's state by the parameter's name in the consolidated model, equal on every rank.

        None if the optimizer is for other parameters; then the next part of a sequence begins with a new state.
        Collective.
        """
        return None

    def artifacts(self) -> list[Artifact]:
        """Further models that this strategy made, at the end of a run. Collective."""
        return []

    def representatives(self) -> list[int]:
        """For each rank of the world, one that sends as much, and as often. Recording these is enough to plan a run."""
        comm: Comm = self.comm  # type: ignore[attr-defined]
        return [0] * comm.size

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to continue exactly."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
