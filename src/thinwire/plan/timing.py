"""How long ranks compute: some steps of a strategy, timed on this machine, lend their times to a recorded run."""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from thinwire import registry
from thinwire.comm.process_groups import own_group
from thinwire.comm.recording import RecordingComm, record
from thinwire.comm.trace import Event, Task, Trace
from thinwire.common.batches import map_tensors
from thinwire.common.cores import num_threads
from thinwire.common.memory import keep_freed_memory
from thinwire.common.messages import quiet
from thinwire.data import Batch
from thinwire.errors import PeerLost, UsageError
from thinwire.plan.one_rank import step_of_one_rank, wait_for_gpu
from thinwire.plan.recorded_run import RecordedRun, Training
from thinwire.strategies.base import Strategy
from thinwire.surgery.costs import activation_bytes

FORWARD = 1 / 3  # share of the forward pass in the computing of a step
UNTYPICAL_STEPS = 2  # the first ones, in which memory is taken and code is loaded
FEWEST_STEPS, FEWEST_SLOW_STEPS, SLOW_SECONDS = 6, 3, 0.05  # steps that are timed at least, and if one takes so long
MOST_EPOCH_STEPS = 4  # of a timed epoch, so that all phases of a run come within few steps;
TIMED_STEPS = 16  # but so many in all


class Effort(NamedTuple):
    """How the real model and machine differ from those whose steps were timed."""

    step_seconds: float = (
        0.0  # that one rank alone computes in a step, where a small model is timed in place of its own
    )
    memory: float = 1.0  # factor
    coding: float = 1.0  # factor of what communication threads compute


class Laps(NamedTuple):
    """The events of a step, or of the end of an epoch, and the tasks that it submitted."""

    name: str  # of the mark at its end
    events: list[Event]


def time_steps(
    spec: str, training: Training, recorded: RecordedRun, seconds: float, is_stand_in: bool = False
) -> dict[int, Trace]:
    """Traces with times of the recorded ranks: a short run of the strategy with real tensors, of about so many seconds.

    Ranks that send to each other take turns, so each rank's time is its own. A small model in place of the real one
    (`is_stand_in`) may be too small for the strategy: then there are no times. Otherwise each of its steps follows one
    of the same model without a strategy, because it is the ratio that counts, and machines are now fast, now slow.
    """
    keep_freed_memory()  # as ranks do
    ranks = sorted(recorded.traces)
    run = _TimedRun(spec, training, seconds * len(ranks), is_stand_in, is_alone=len(ranks) == 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads(max(Counter(recorded.nodes).values())))
    try:
        with own_group() as group:
            timed = record(
                run.train, ranks=len(recorded.nodes), nodes=recorded.nodes, of=ranks, is_timed=True, group=group
            )
    except UsageError:
        if not is_stand_in:
            raise
        return {rank: Trace(len(recorded.nodes)) for rank in ranks}
    finally:
        torch.set_num_threads(threads)
    return {rank: trace for rank, (trace, _, _) in timed.items()}


class _TimedRun:
    def __init__(self, spec: str, training: Training, seconds: float, is_stand_in: bool, is_alone: bool) -> None:
        self.spec, self.training, self.end = spec, training, time.perf_counter() + seconds
        self.is_stand_in = is_stand_in
        self.is_alone = is_alone  # no other rank waits for the messages of steps that are left out
        self.epoch_steps = max(MOST_EPOCH_STEPS, -(-TIMED_STEPS // training.epochs))

    def train(self, comm: RecordingComm) -> None:
        """Train for some steps of every epoch, until the time is over or another rank has ended."""
        recipe = replace(self.training.recipe, epochs=self.training.epochs, compile=False)
        with quiet():
            strategy = registry.build("strategies", self.spec, copy.deepcopy(self.training.model), recipe, comm)
            step_alone = step_of_one_rank(self.training, recipe, comm.size) if self.is_stand_in else None
            steps, begin = 0, time.perf_counter()
            comm.trace.skip()
            try:
                for _ in range(self.training.epochs):
                    batches = self.training.batches(strategy.shard)[: self.epoch_steps]
                    strategy.begin_epoch(len(batches))
                    for given in batches:
                        if step_alone is not None:
                            comm.trace.plain_seconds.append(step_alone())
                        batch = map_tensors(given, torch.clone)  # a model may change what it is given
                        comm.trace.lap()
                        if steps == 1:  # the first one may do other things, such as cutting the model
                            comm.trace.kept_bytes = _kept_in(strategy, batch)
                        else:
                            strategy.step(batch)
                        wait_for_gpu()
                        comm.trace.add("mark", op="step")
                        steps += 1
                        if self.is_alone and self._has_enough(steps, begin):
                            break
                    strategy.end_epoch()
                    wait_for_gpu()
                    comm.trace.add("mark", op="epoch")
                    if self._has_enough(steps, begin):
                        return
            except PeerLost:  # a rank that had enough time
                if not steps:
                    raise

    def _has_enough(self, steps: int, begin: float) -> bool:
        now = time.perf_counter()
        is_slow = steps * SLOW_SECONDS < now - begin
        return steps >= (FEWEST_SLOW_STEPS if is_slow else FEWEST_STEPS) and now > self.end


def _kept_in(strategy: Strategy, batch: Batch) -> int:
    """Take a step; returns the bytes that its forward passes keep for backward passes."""
    with activation_bytes(strategy.model) as kept:  # type: ignore[attr-defined]
        strategy.step(batch)
    return sum(kept.values())


# ---- times of a recorded run's events


class Times:
    """What the timed steps of a rank show: seconds of its main thread by the events of a step, of tasks by theirs."""

    def __init__(self, trace: Trace, step_seconds: float = 0.0) -> None:
        laps = _scaled(_laps(trace), trace.plain_seconds, step_seconds)
        typical = laps[UNTYPICAL_STEPS:] if len(laps) > 2 * UNTYPICAL_STEPS else laps
        self.steps = _medians(((lap.name, *map(_shape, lap.events)), lap.events) for lap in typical)
        self.like_steps = _medians(((lap.name, *map(_loose_shape, lap.events)), lap.events) for lap in typical)
        self.plain = statistics.median([_total(lap.events) for lap in typical if lap.name == "step"] or [step_seconds])
        tasks = trace.tasks[len(trace.tasks) // 4 :]
        self.tasks = _medians((tuple(map(_shape, task.events)), task.events) for task in tasks)
        self.largest: dict[Hashable, Task] = {}  # by its events, whatever their sizes
        for task in tasks:
            known = self.largest.setdefault(tuple(map(_loose_shape, task.events)), task)
            if _size(task.events) > _size(known.events):
                self.largest[tuple(map(_loose_shape, task.events))] = task

    def of_lap(self, lap: Laps) -> list[float]:
        """Seconds before each event of a step."""
        exact = self.steps.get((lap.name, *map(_shape, lap.events)))
        alike = exact or self.like_steps.get((lap.name, *map(_loose_shape, lap.events)))
        if alike is not None:
            return alike
        submits = [event.kind == "submit" for event in lap.events]
        plain = self.plain if lap.name == "step" else 0.0
        share = 1 - FORWARD if any(submits) else 0.0  # the backward pass gives buckets away while it goes on
        spread = [plain * share / max(1, sum(submits)) * submit for submit in submits]
        return [spread[0] + plain * (1 - share), *spread[1:]]

    def of_task(self, task: Task) -> list[float]:
        """Seconds before each event of a task; of one with other sizes, in proportion."""
        exact = self.tasks.get(tuple(map(_shape, task.events)))
        if exact is not None:
            return exact
        alike = self.largest.get(tuple(map(_loose_shape, task.events)))
        if alike is None:
            return [0.0] * len(task.events)
        factor = _size(task.events) / max(1, _size(alike.events))
        return [factor * seconds for seconds in self.tasks[tuple(map(_shape, alike.events))]]


def with_times(recorded: RecordedRun, timed: Mapping[int, Trace], effort: Effort = Effort()) -> dict[int, Trace]:
    """The recorded run's traces, with times of the timed ones."""
    times = {rank: Times(timed[rank], effort.step_seconds) for rank in recorded.traces}
    return {rank: _filled(trace, times[rank], effort) for rank, trace in recorded.traces.items()}


def _filled(trace: Trace, times: Times, effort: Effort) -> Trace:
    filled = copy.copy(trace)
    filled.events = [
        event._replace(seconds=seconds)
        for lap in _laps(trace)
        for event, seconds in zip(lap.events, times.of_lap(lap), strict=True)
    ]
    filled.tasks = [
        Task(task.thread, [
            event._replace(seconds=seconds * effort.coding)
            for event, seconds in zip(task.events, times.of_task(task), strict=True)
        ])
        for task in trace.tasks
    ]  # fmt: skip
    return filled


def _laps(trace: Trace) -> list[Laps]:
    """The events of a trace, cut behind each mark; what comes before the first step counts to it."""
    laps, events = [], []
    for event in trace.events:
        events.append(event)
        if event.kind == "mark":
            laps.append(Laps(event.op, events))
            events = []
    return laps


def _scaled(laps: list[Laps], plain_seconds: Sequence[float], step_seconds: float) -> list[Laps]:
    """Laps of a small model as they would be of the real one: each compared with the plain step that came before it."""
    found, number = [], -1
    for lap in laps if plain_seconds else ():
        number += lap.name == "step"
        factor = step_seconds / plain_seconds[max(0, number)]
        found.append(Laps(lap.name, [event._replace(seconds=factor * event.seconds) for event in lap.events]))
    return found or laps


def _shape(event: Event) -> Hashable:
    return event.kind, event.op, event.payload


def _loose_shape(event: Event) -> Hashable:
    return event.kind, event.op


def _size(events: Sequence[Event]) -> int:
    return sum(event.payload for event in events)


def _total(events: Sequence[Event]) -> float:
    return sum(event.seconds for event in events)


def _medians(groups: Iterable[tuple[Hashable, Sequence[Event]]]) -> dict[Hashable, list[float]]:
    """The median of the seconds of each event, over all that have the same shape."""
    found: dict[Hashable, list[list[float]]] = defaultdict(list)
    for shape, events in groups:
        found[shape].append([event.seconds for event in events])
    return {shape: [statistics.median(column) for column in zip(*rows, strict=True)] for shape, rows in found.items()}
