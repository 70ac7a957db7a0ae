"""Forecasts: what strategies would take and send on a network, from one short measurement on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from thinwire import registry
from thinwire.comm.trace import Trace
from thinwire.plan.lengthening import ENOUGH_STEPS, lengthened
from thinwire.plan.predict import predict_epochs
from thinwire.plan.recorded_run import RecordedRun, Training, record_run
from thinwire.plan.timing import Effort, time_steps
from thinwire.plan.wire import Wire
from thinwire.spec import parse

PLAIN_EPOCHS, PLAIN_STEPS = 2, 256  # that are recorded of a strategy whose epochs are all alike
FEW_STEPS = 32  # in place of those if the model is too large to be timed
FEWEST_PLAIN_STEPS = 48  # in all: rounds may be longer than epochs
PHASED_STEPS, FEWEST_STEPS, MOST_EPOCHS = 160, 8, 100  # of one that has phases: in all, of an epoch, and epochs


class Workload(Protocol):
    """What is to be trained, for any number of ranks."""

    epochs: int

    @property
    def is_timed(self) -> bool:
        """Whether steps of the model itself are timed, and not those of a small one in its place."""

    def steps_per_epoch(self, ranks: int) -> int: ...

    def training(self, ranks: int, epochs: int, most_steps: int) -> Training:
        """A run of so many epochs, with at most so many steps in each, and a model that may be on the meta device."""

    def stand_in(self, ranks: int, epochs: int, most_steps: int) -> Training:
        """The same, or with a small model if the real one cannot be run here; its steps are timed."""

    def effort(self, ranks: int) -> Effort:
        """How the real model differs from the stand-in."""


class Forecast(NamedTuple):
    """What a strategy would take on a network. Bytes per step are of a rank on average, `between` of all ranks."""

    strategy: str
    seconds_per_step: float
    seconds_per_epoch: float
    waiting_share: float
    wire_bytes_per_step: float
    kernel_bytes_per_step: float
    between_bytes_per_step: float
    memory_bytes: int


@dataclass(frozen=True)
class Study:
    """A strategy on a number of ranks: its recorded run, the times of its steps, and the memory of a rank."""

    spec: str
    recorded: RecordedRun
    timed: dict[int, Trace]
    effort: Effort
    steps_per_epoch: int
    first_typical_epoch: int  # epochs before it are not counted
    memory_bytes: int

    def forecast(self, wire: Wire) -> Forecast:
        """The strategy on a network."""
        epochs = predict_epochs(self.recorded, self.timed, wire, self.effort)
        first, recorded = self.first_typical_epoch, self.recorded.steps_per_epoch
        count = len(epochs.seconds) - first
        steps = count * recorded
        seconds = sum(epochs.seconds[first:]) / steps
        ranks = len(self.recorded.nodes)
        return Forecast(
            self.spec, seconds, seconds * self.steps_per_epoch,
            sum(epochs.waiting[first:]) / max(1e-12, sum(epochs.seconds[first:])),
            sum(epochs.wire_bytes[first:]) / steps / ranks, sum(epochs.kernel_bytes[first:]) / steps / ranks,
            sum(epochs.between_bytes[first:]) / steps, self.memory_bytes,
        )  # fmt: skip


def study(spec: str, workload: Workload, nodes: Sequence[int], seconds: float = 1.0) -> Study:
    """Record a strategy's run and time its steps, for about so many seconds.

    Raises UsageError if the strategy cannot train this on so many ranks.
    """
    ranks = len(nodes)
    recorded, length = _record(spec, workload, nodes)
    effort = workload.effort(ranks)
    training = workload.stand_in(ranks, length.epochs, length.steps)
    timed = time_steps(spec, training, recorded, seconds, is_stand_in=effort.step_seconds > 0)
    return _study(spec, recorded, timed, effort, length)


def study_elsewhere(one: Study, workload: Workload, nodes: Sequence[int], seconds: float = 0.3) -> Study:
    """A strategy that was studied, on other nodes: recorded again, with the times that are known.

    Where each rank keeps other tensors than before, as parts of a model, its steps are timed again.
    """
    ranks = len(nodes)
    recorded, length = _record(one.spec, workload, nodes)
    before, now = ([s.state_bytes[rank] for rank in sorted(s.traces)] for s in (one.recorded, recorded))
    if before == now:
        timed = dict(zip(sorted(recorded.traces), (one.timed[rank] for rank in sorted(one.timed)), strict=True))
    else:
        training = workload.stand_in(ranks, length.epochs, length.steps)
        timed = time_steps(one.spec, training, recorded, seconds, is_stand_in=one.effort.step_seconds > 0)
    return _study(one.spec, recorded, timed, one.effort, length)


class _Length(NamedTuple):
    """How much of a run is recorded: epochs and steps of each; steps that an epoch has; the first epoch that counts."""

    epochs: int
    steps: int
    actual: int
    first: int


def _record(spec: str, workload: Workload, nodes: Sequence[int]) -> tuple[RecordedRun, _Length]:
    """The recorded run; of epochs whose steps are alike few steps are recorded, and repeated."""
    ranks = len(nodes)
    length = _length(spec, workload, ranks)
    if length.steps > ENOUGH_STEPS and length.first:
        short = replace(workload.training(ranks, PLAIN_EPOCHS, ENOUGH_STEPS), only_alike=True)
        long = lengthened(record_run(spec, short, nodes), length.steps)
        if long is not None:
            return long, length._replace(epochs=PLAIN_EPOCHS)
    return record_run(spec, workload.training(ranks, length.epochs, length.steps), nodes), length


def _length(spec: str, workload: Workload, ranks: int) -> _Length:
    actual = workload.steps_per_epoch(ranks)
    names = {parse(spec).name, *(one.name for one in registry.strategies_in(spec))}
    if any(registry.load("strategies", name).has_phases for name in names):
        epochs = min(workload.epochs, MOST_EPOCHS)
        return _Length(epochs, min(actual, max(FEWEST_STEPS, PHASED_STEPS // epochs)), actual, 0)
    steps = min(actual, PLAIN_STEPS if workload.is_timed else FEW_STEPS)
    epochs = min(workload.epochs, max(PLAIN_EPOCHS, -(-FEWEST_PLAIN_STEPS // steps)))
    return _Length(epochs, steps, actual, 1 if epochs > 1 else 0)


def _study(spec: str, recorded: RecordedRun, timed: dict[int, Trace], effort: Effort, length: _Length) -> Study:
    memory = max(recorded.state_bytes.values()) + round(
        effort.memory * max(trace.kept_bytes for trace in timed.values())
    )
    return Study(str(parse(spec)), recorded, timed, effort, length.actual, length.first, memory)
