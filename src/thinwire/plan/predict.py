"""Predict a run on a network: seconds, waiting and bytes of its epochs, from a recorded run and timed steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from thinwire.comm.trace import Event, Trace
from thinwire.plan.recorded_run import RecordedRun
from thinwire.plan.replay import replay
from thinwire.plan.timing import Effort, with_times
from thinwire.plan.transfers import MANY_RANKS
from thinwire.plan.wire import Wire, messages

TRAINING = ("train", "sync")


class Sent(NamedTuple):
    """Bytes of all ranks: by the ledger, as the Linux kernel counts them, and the part of both that leaves a node."""

    wire: float = 0.0
    kernel: float = 0.0
    between: float = 0.0
    kernel_between: float = 0.0

    def plus(self, other: Sent) -> Sent:
        return Sent(*(a + b for a, b in zip(self, other, strict=True)))


class Epochs(NamedTuple):
    """For each epoch of a run: seconds, seconds that a rank waits on average, and bytes of all ranks."""

    seconds: list[float]
    waiting: list[float]
    wire_bytes: list[float]
    kernel_bytes: list[float]
    between_bytes: list[float]
    kernel_between_bytes: list[float]


def predict_epochs(recorded: RecordedRun, timed: Mapping[int, Trace], wire: Wire, effort: Effort = Effort()) -> Epochs:
    """Replay a recorded run on a network, with the times of timed steps."""
    result = replay(with_times(recorded, timed, effort), recorded.stands_for, recorded.nodes, wire)
    sent = [[one[i] for one in sent_by_epoch(recorded, wire)] for i in range(len(Sent._fields))]
    return Epochs(_steps(result.seconds("epoch")), _steps(result.waited("epoch")), *sent)


def _steps(times: list[float]) -> list[float]:
    return [now - before for before, now in zip([0.0, *times], times, strict=False)]


def sent_by_epoch(recorded: RecordedRun, wire: Wire) -> list[Sent]:
    """What all ranks send for training in each epoch."""
    known: dict[Hashable, Sent] = {}
    found: list[Sent] = []
    for rank, trace in recorded.traces.items():
        represented = [r for r, recorded in enumerate(recorded.stands_for) if recorded == rank]
        for epoch, events in enumerate(_epochs(trace)):
            total = Sent()
            for event in events:
                if event.kind == "start" and event.purpose in TRAINING:
                    key = rank, event.op, event.channel.group, event.payload, tuple(event.sent.items())
                    if key not in known:
                        known[key] = _sent_in(event, rank, represented, recorded, wire)
                    total = total.plus(known[key])
            found += [Sent()] * (epoch + 1 - len(found))
            found[epoch] = found[epoch].plus(total)
    return found


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


def _sent_in(event: Event, rank: int, represented: list[int], recorded: RecordedRun, wire: Wire) -> Sent:
    """What a rank sends in an operation, and all ranks that it stands for: each to the same places behind it."""
    groups = {r: group for group in recorded.traces[rank].groups[event.channel.group] for r in group}
    own = groups[rank].index(rank)
    number = messages(event.op, event.payload, len(groups[rank]), len(event.sent)) / max(1, len(event.sent))
    total = Sent()
    if event.op == "all_to_all" and len(groups[rank]) > MANY_RANKS:
        parts = sum(event.sent.values())
        kernel = wire.kernel_bytes(parts, len(event.sent))
        node_sizes = Counter((id(group), recorded.nodes[r]) for r, group in groups.items())
        for other in represented:
            own_node = node_sizes[id(groups[other]), recorded.nodes[other]]
            leaving = (len(groups[other]) - own_node) / (len(groups[other]) - 1)
            total = total.plus(Sent(parts, kernel, parts * leaving, kernel * leaving))
        return total
    for other in represented:
        group = groups[other]
        shift = group.index(other) - own
        for to, count in event.sent.items():
            leaves = recorded.nodes[group[(to + shift) % len(group)]] != recorded.nodes[other]
            kernel = wire.kernel_bytes(count, number)
            total = total.plus(Sent(count, kernel, count * leaves, kernel * leaves))
    return total
