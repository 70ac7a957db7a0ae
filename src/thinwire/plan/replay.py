"""Replay the traces of ranks on a network: when each step ends, and how long ranks wait.

Threads compute, at a speed that depends on how many of a machine do; operations begin when all their ranks have
reached them, wait for their hops, and then share links with others that are under way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.comm.trace import MAIN, Event, Trace
from thinwire.errors import RunError
from thinwire.plan.transfers import Operation, Place, Transfers
from thinwire.plan.wire import Wire

TINY = 1e-12


@dataclass
class Result:
    """What a replay gives: the times of each rank's marks, and how long its main thread waited until each."""

    marks: dict[int, list[tuple[str, float, float]]] = field(default_factory=dict)  # name, time, waited so far

    def seconds(self, name: str) -> list[float]:
        """When the last rank reached each mark of a name."""
        return [max(times) for times in zip(*self._of(name, 1), strict=True)]

    def waited(self, name: str) -> list[float]:
        """How long a rank had waited until each mark of a name, on average."""
        return [sum(times) / len(times) for times in zip(*self._of(name, 2), strict=True)]

    def _of(self, name: str, index: int) -> list[list[float]]:
        return [[mark[index] for mark in marks if mark[0] == name] for marks in self.marks.values()]  # type: ignore[misc]


@dataclass
class _Work:
    """Something that takes time: computing, the hops of an operation, or its bytes."""

    left: float  # 1 = all of it; of computing, seconds; of hops, their number
    done: Callable[[], None]
    demands: Mapping[Place, float] = field(default_factory=dict)  # seconds of each link, or machine, that it needs
    weight: float = 1.0  # threads that it keeps busy
    machine: int | None = None
    is_between: bool | None = None  # of hops: whether they leave a node


class _Thread:
    """A thread of a rank: its events, and what it waits for."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number
        self.events: Sequence[Event] = []
        self.at, self.has_computed = 0, False
        self.tasks: deque[int] = deque()
        self.task: int | None = None
        self.waits_since: float | None = None


class Replay:
    """Some ranks, each of which may stand for several, on a network."""

    def __init__(
        self, traces: Mapping[int, Trace], stands_for: Sequence[int], nodes: Sequence[int], wire: Wire
    ) -> None:
        self.traces, self.wire, self.nodes = traces, wire, nodes
        self.transfers = Transfers(traces, stands_for, nodes)
        self.counts = {rank: sum(1 for rep in stands_for if rep == rank) for rank in traces}
        self.now = 0.0
        self.works: list[_Work] = []
        self.threads = {(rank, MAIN): _Thread(rank, MAIN) for rank in traces}
        self.finished: set[tuple[int, int]] = set()  # tasks, by rank and number
        self.waiting: dict[Hashable, list[_Thread]] = defaultdict(list)
        self.operations: dict[tuple[int, int], Operation] = {}  # by rank and number
        self.waited = dict.fromkeys(traces, 0.0)
        self._demands: dict[Hashable, dict[Place, float]] = {}  # by the shape of an operation
        self.result = Result({rank: [] for rank in traces})

    def run(self) -> Result:
        """Replay everything."""
        for rank, trace in self.traces.items():
            thread = self.threads[rank, MAIN]
            thread.events = trace.events
            self._advance(thread)
        while self.works:
            self._step()
        if stuck := [rank for rank in self.traces if (main := self.threads[rank, MAIN]).at < len(main.events)]:
            raise RunError(f"ranks {stuck} of a replay wait for each other: a strategy's ranks do not fit together")
        return self.result

    # ---- time

    def _step(self) -> None:
        """Go to the next time at which some work is done."""
        speeds = self._speeds()
        elapsed = min(work.left / speed for work, speed in zip(self.works, speeds, strict=True))
        self.now += elapsed
        done = []
        for work, speed in zip(self.works, speeds, strict=True):
            work.left -= elapsed * speed
            if work.left <= TINY * max(1.0, speed):
                done.append(work)
        self.works = [work for work in self.works if work not in done]
        for work in done:
            work.done()

    def _speeds(self) -> list[float]:
        """How fast each work goes: computing by the busy threads of its machine, bytes by the sharers of each link."""
        busy: dict[int, float] = defaultdict(float)
        sharers: dict[Place, int] = defaultdict(int)
        for work in self.works:
            if work.machine is not None or self.wire.is_one_machine:
                busy[work.machine or 0] += work.weight
            for link in work.demands:
                sharers[link] += 1
        speeds = []
        for work in self.works:
            if work.machine is not None:
                speeds.append(self.wire.computing_speed(busy[work.machine]))
            elif work.is_between is not None:
                crowd = busy[0] if self.wire.is_one_machine else max(busy.values(), default=0.0)
                speeds.append(1 / max(TINY, self.wire.latency(work.is_between, crowd)))
            elif work.demands:
                speeds.append(1 / max(sharers[link] * seconds for link, seconds in work.demands.items()))
            else:
                speeds.append(1.0)
        return speeds

    # ---- threads

    def _advance(self, thread: _Thread) -> None:
        """Let a thread go on until it computes or waits."""
        while thread.at < len(thread.events):
            event = thread.events[thread.at]
            if event.seconds > 0 and not thread.has_computed:
                thread.has_computed = True
                self._compute(thread, event.seconds)
                return
            if not self._handle(thread, event):
                return
            thread.at, thread.has_computed = thread.at + 1, False
        if thread.task is not None:
            self.finished.add((thread.rank, thread.task))
            self._wake(("task", thread.rank, thread.task))
            thread.task = None
        self._next_task(thread)

    def _handle(self, thread: _Thread, event: Event) -> bool:
        """Whether the thread goes on after an event, or has to wait."""
        rank = thread.rank
        if event.kind == "mark":
            if event.op:
                self.result.marks[rank].append((event.op, self.now, self.waited[rank]))
        elif event.kind == "start":
            operation = self.transfers.reached(rank, event)
            self.operations[rank, event.number] = operation
            if operation.is_complete and not operation.has_begun:
                self._begin(operation)
        elif event.kind == "wait":
            operation = self.operations[rank, event.number]
            return operation.is_done or self._wait(thread, id(operation))
        elif event.kind == "submit":
            lane = self.traces[rank].tasks[event.number].thread
            other = self.threads.setdefault((rank, lane), _Thread(rank, lane))
            other.tasks.append(event.number)
            if other.task is None:
                self._next_task(other)
        else:
            return (rank, event.number) in self.finished or self._wait(thread, ("task", rank, event.number))
        return True

    def _wait(self, thread: _Thread, what: Hashable) -> bool:
        self.waiting[what].append(thread)
        thread.waits_since = self.now
        return False

    def _wake(self, what: Hashable) -> None:
        for thread in self.waiting.pop(what, []):
            if thread.number == MAIN and thread.waits_since is not None:
                self.waited[thread.rank] += self.now - thread.waits_since
            thread.waits_since = None
            self._advance(thread)

    def _next_task(self, thread: _Thread) -> None:
        if thread.number != MAIN and thread.tasks and thread.task is None:
            thread.task = thread.tasks.popleft()
            thread.events, thread.at = self.traces[thread.rank].tasks[thread.task].events, 0
            thread.has_computed = False
            self._advance(thread)

    # ---- work

    def _compute(self, thread: _Thread, seconds: float) -> None:
        machine = 0 if self.wire.is_one_machine else self.nodes[thread.rank]
        weight = self.counts[thread.rank] if self.wire.is_one_machine else self.transfers.ranks_on_node(thread.rank)
        self.works.append(_Work(seconds, lambda: self._advance(thread), weight=weight, machine=machine))

    def _begin(self, operation: Operation) -> None:
        operation.has_begun = True
        shape = operation.shape
        if shape not in self._demands:
            self._demands[shape] = operation.demands(self.wire)
        demands = self._demands[shape]

        is_between, crowd = operation.is_between, sum(map(len, operation.siblings))

        def send() -> None:
            if demands and max(demands.values()) > 0:
                self.works.append(_Work(1.0, finish, demands, crowd * self.wire.sending_share))
            else:
                finish()

        def finish() -> None:
            operation.is_done = True
            self._wake(id(operation))

        if operation.num_hops and self.wire.latency(is_between) > 0:
            self.works.append(_Work(operation.num_hops, send, weight=crowd, is_between=is_between))
        else:
            send()


def replay(traces: Mapping[int, Trace], stands_for: Sequence[int], nodes: Sequence[int], wire: Wire) -> Result:
    """The times of all marks when ranks with these traces run on a network; `stands_for[r]` is recorded for rank r.

    >>> from thinwire.comm.recording import record
    >>> from thinwire.netlab.link import Link
    >>> import torch
    >>> def train(comm):
    ...     comm.sum(torch.zeros(2_500_000))
    ...     comm.trace.add("mark", op="step")
    >>> traces = {rank: one[0] for rank, one in record(train, ranks=2, nodes=2).items()}
    >>> [round(t, 2) for t in replay(traces, [0, 1], [0, 1], Wire(Link(100))).seconds("step")]  # 10 MB at 100 Mbit/s
    [0.86]
    """
    return Replay(traces, stands_for, nodes, wire).run()
