"""Predict a run on a network: seconds, waiting and bytes of its epochs, from a recorded schedule and timed steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from thinwire.comm.trace import Event, Trace
from thinwire.plan.replay import replay
from thinwire.plan.schedule import Schedule
from thinwire.plan.timing import with_times
from thinwire.plan.wire import Wire, messages


class Epochs(NamedTuple):
    """For each epoch of a run: seconds, seconds that a rank waits, and bytes of all ranks between nodes."""

    seconds: list[float]
    waiting: list[float]
    kernel: list[float]
    wire: list[float]


def predict_epochs(schedule: Schedule, timed: Mapping[int, Trace], wire: Wire) -> Epochs:
    """Replay a schedule on a network, with the times of timed steps."""
    result = replay(with_times(schedule, dict(timed)), schedule.stands_for, schedule.nodes, wire)
    kernel, sent = bytes_by_epoch(schedule, wire)
    return Epochs(_steps(result.seconds("epoch")), _steps(result.waited("epoch")), kernel, sent)


def _steps(times: list[float]) -> list[float]:
    return [now - before for before, now in zip([0.0, *times], times, strict=False)]


def bytes_by_epoch(schedule: Schedule, wire: Wire) -> tuple[list[float], list[float]]:
    """What all ranks send between nodes in each epoch: as the Linux kernel counts, and by the ledger."""
    kernel = [0.0] * 0
    sent = [0.0] * 0
    for rank, trace in schedule.traces.items():
        weight = schedule.stands_for.count(rank)
        for epoch, events in enumerate(_epochs(trace)):
            if epoch == len(kernel):
                kernel.append(0.0)
                sent.append(0.0)
            for event in events:
                if event.kind == "start" and event.purpose in ("train", "sync"):
                    k, w = _between(event, rank, trace, schedule, wire)
                    kernel[epoch] += weight * k
                    sent[epoch] += weight * w
    return kernel, sent


def _epochs(trace: Trace) -> list[list[Event]]:
    """The events of all threads, by the epoch in which they were submitted."""
    epochs: list[list[Event]] = [[]]
    for event in trace.events:
        if event.kind == "submit":
            epochs[-1] += trace.tasks[event.number].events
        epochs[-1].append(event)
        if event.kind == "mark" and event.op == "epoch":
            epochs.append([])
    return epochs[:-1]


def _between(event: Event, rank: int, trace: Trace, schedule: Schedule, wire: Wire) -> tuple[float, float]:
    """Bytes of an operation that leave the node of a rank: as Linux counts them, and by the ledger."""
    group = next(g for g in trace.groups[event.channel.group] if rank in g)
    here = schedule.nodes[rank]
    number = messages(event.op, event.payload, len(group), len(event.sent)) / max(1, len(event.sent))
    kernel = sent = 0.0
    for to, count in event.sent.items():
        if schedule.nodes[group[to]] != here:
            kernel += wire.kernel_bytes(count, number)
            sent += count
    return kernel, sent
