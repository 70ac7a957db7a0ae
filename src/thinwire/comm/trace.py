"""A trace: what one rank computes, sends and waits for, in order; a recording of a strategy that can be replayed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from thinwire.comm.wire_bytes import Sent

Kind = Literal["start", "wait", "submit", "join", "mark"]
MAIN = 0  # the thread that computes


class Channel(NamedTuple):
    """A group of ranks and one of its lanes. Operations of a channel are in the same order on all its ranks."""

    group: int  # 0 = all ranks; others count the groups that were split
    lane: int


class Event(NamedTuple):
    """Something that a thread of a rank does, and the seconds that it computed since its last event.

    start: begins operation `number`; wait: waits for operation `number`; submit: gives task `number` to another thread;
    join: waits for task `number`; mark: a place in the run, named by `op`.
    """

    kind: Kind
    number: int
    seconds: float
    op: str = ""
    channel: Channel = Channel(0, 0)
    payload: int = 0
    sent: Sent = {}  # noqa: RUF012  # a tuple: nobody changes it
    source: int = -1  # of a receive
    purpose: str = "train"


class Task(NamedTuple):
    """What a communication thread is given to do: events in order, ending with an empty mark."""

    thread: int
    events: list[Event]


class Trace:
    """The events of one rank: those of its main thread, and the tasks that it gave to others.

    `groups` has the members of all groups of each split, as world ranks: the first split is that of the world.
    """

    def __init__(self, ranks: int, is_timed: bool = False) -> None:
        self.events: list[Event] = []
        self.tasks: list[Task] = []
        self.groups: list[list[list[int]]] = [[list(range(ranks))]]
        self.threads: dict[Channel, int] = {}  # the communication thread of each channel that has one
        self.is_timed = is_timed
        self.num_operations = 0
        self.kept_bytes = 0  # for backward passes, in a timed step
        self.plain_seconds: list[float] = []  # of steps of one rank alone, each before one of a timed run
        self._into = self.events  # the list that events are added to now
        self._since = time.perf_counter()

    def add(self, kind: Kind, number: int = 0, **about: object) -> None:
        """Add an event to the thread that runs now."""
        self._into.append(Event(kind, number, self.lap(), **about))  # type: ignore[arg-type]

    def lap(self) -> float:
        """The seconds since the last call, if this trace is timed; what runs is one thread after the other."""
        if not self.is_timed:
            return 0.0
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed

    def skip(self) -> None:
        """Do not count the time since the last event: this rank was not running."""
        self._since = time.perf_counter()

    def submit(self, channel: Channel) -> int:
        """The main thread gives a task to the communication thread of a channel; returns its number."""
        thread = self.threads.setdefault(channel, len(self.threads) + 1)
        self.add("submit", len(self.tasks))
        self.tasks.append(Task(thread, []))
        return len(self.tasks) - 1

    @contextmanager
    def running(self, task: int) -> Iterator[None]:
        """Inside, events belong to a task."""
        before, pause = self._into, self.lap()
        self._into = self.tasks[task].events
        try:
            yield
        finally:
            self.add("mark")
            self._into = before
            self._since -= pause  # what the other thread had computed when this one took over
