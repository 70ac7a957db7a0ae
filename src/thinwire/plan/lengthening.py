"""Make recorded epochs longer: of a strategy whose steps are alike, few of them have to be recorded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from thinwire.comm.trace import MAIN, Event, Task, Trace
from thinwire.plan.recorded_run import RecordedRun

ENOUGH_STEPS = 8  # of an epoch; its first and last ones may differ from those between


def lengthened(recorded: RecordedRun, steps: int) -> RecordedRun | None:
    """The same run with so many steps in each epoch: a step of its middle is repeated. None if steps are not alike.

    The ledgers stay those of the short run.
    """
    if not recorded.steps_are_alike:
        return None
    traces = {rank: _lengthened(trace, steps - recorded.steps_per_epoch) for rank, trace in recorded.traces.items()}
    if any(trace is None for trace in traces.values()):
        return None
    found = {rank: trace for rank, trace in traces.items() if trace is not None}
    return replace(recorded, traces=found, steps_per_epoch=steps)


def _lengthened(trace: Trace, more: int) -> Trace | None:
    long = copy.copy(trace)
    long.events, long.tasks = [], []
    operations = tasks = 0  # by how much the numbers behind the last repeated step have grown
    for epoch in _epochs(trace):
        periods = {number: _period(trace, *epoch[number - 1 : number + 2]) for number in range(1, len(epoch) - 1)}
        alike = [(number, period) for number, period in periods.items() if period is not None]
        if not alike:
            return None
        repeated, period = alike[0]
        for number, lap in enumerate(epoch):
            _append(long, trace, lap, operations, tasks)
            for _ in range(more if number == repeated else 0):
                operations, tasks = operations + period[0], tasks + period[1]
                _append(long, trace, lap, operations, tasks)
    long.num_operations = trace.num_operations + operations
    return long


def _epochs(trace: Trace) -> list[list[list[Event]]]:
    """The events of each step, epoch by epoch; what comes behind an epoch's last step counts to that."""
    epochs: list[list[list[Event]]] = [[[]]]
    for event in trace.events:
        epochs[-1][-1].append(event)
        if event.kind == "mark":
            if event.op == "epoch":
                epochs[-1][-2:] = [epochs[-1][-2] + epochs[-1][-1]]
                epochs.append([[]])
            else:
                epochs[-1].append([])
    return epochs[:-1]


def _period(trace: Trace, *laps: Sequence[Event]) -> tuple[int, int] | None:
    """By how much the numbers of operations and of tasks grow from step to step; None if steps are not alike."""
    rows = [[(event, MAIN) for event in lap] + _in_tasks(trace, lap) for lap in laps]
    if len({len(row) for row in rows}) > 1:
        return None
    growth: dict[bool, set[int]] = {False: set(), True: set()}  # of operations, of tasks
    for before, after in ((rows[0], rows[1]), (rows[1], rows[2])):
        for (one, thread), (other, other_thread) in zip(before, after, strict=True):
            if one._replace(number=0) != other._replace(number=0) or thread != other_thread:
                return None
            if one.kind != "mark":
                growth[one.kind in ("submit", "join")].add(other.number - one.number)
    if any(len(found) > 1 for found in growth.values()):
        return None
    return sum(growth[False]), sum(growth[True])


def _in_tasks(trace: Trace, lap: Sequence[Event]) -> list[tuple[Event, int]]:
    """The events of the tasks that a step submits, with their threads."""
    tasks = [trace.tasks[event.number] for event in lap if event.kind == "submit"]
    return [(event, task.thread) for task in tasks for event in task.events]


def _append(long: Trace, trace: Trace, lap: Sequence[Event], operations: int, tasks: int) -> None:
    """Add the events of a step and its tasks, with numbers that are higher by so much."""

    def moved(event: Event) -> Event:
        by = {"start": operations, "wait": operations, "submit": tasks, "join": tasks, "mark": 0}[event.kind]
        return event._replace(number=event.number + by)

    for event in lap:
        long.events.append(moved(event))
        if event.kind == "submit":
            thread, events = trace.tasks[event.number]
            long.tasks.append(Task(thread, [moved(one) for one in events]))
