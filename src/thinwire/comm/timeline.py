"""When a rank computed, communicated and waited. Waiting is always added up, spans are recorded for few steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

Kind = Literal["step", "waiting", "communication"]


class Span(NamedTuple):
    """A period of time, on the clock of time.perf_counter."""

    kind: Kind
    name: str
    begin: float
    end: float
    step: int
    bytes: int = 0


class Timeline:
    """One rank's use of time.

    Inside `step`, the thread that computes is waiting while it runs an operation of a Comm or waits for one.
    Operations on other threads are communication, but not waiting.

    >>> timeline = Timeline()
    >>> with timeline.step(0):
    ...     timeline.add_waiting(1.0, 1.5)
    >>> timeline.waiting_seconds
    0.5
    """

    def __init__(self) -> None:
        self.waiting_seconds = 0.0
        self._computing_thread: int | None = None  # set inside `step`
        self._step = 0
        self._spans: list[Span] = []
        self._is_recording = False
        self._operations: list[tuple[float, float]] = []  # begin and end of this step's operations, on all threads

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A training step, on the thread that computes."""
        begin = time.perf_counter()
        self._step = number
        self._operations = []
        self._computing_thread = threading.get_ident()
        try:
            yield
        finally:
            self._computing_thread = None
            self._keep(Span("step", "", begin, time.perf_counter(), number))

    @property
    def step_number(self) -> int:
        """The step that is under way, or was the last one; 0 before the first."""
        return self._step

    def add_waiting(self, begin: float, end: float) -> None:
        """The current thread waited. It counts only if it is the computing thread, inside a step."""
        if self._computing_thread == threading.get_ident():
            self.waiting_seconds += end - begin
            self._keep(Span("waiting", "", begin, end, self._step))

    def add_waiting_for_background(self, begin: float, end: float) -> None:
        """The computing thread waited for another thread. It counts only while that one had an operation in flight.

        What the other thread does between operations, such as copying or compressing, is computing.
        """
        for op_begin, op_end in sorted(self._operations):
            if op_begin < end and op_end > begin:
                self.add_waiting(max(begin, op_begin), min(end, op_end))
                begin = min(end, op_end)  # operations may overlap

    @property
    def operation_seconds(self) -> float:
        """How long this step had operations in flight; they may overlap."""
        total, until = 0.0, 0.0
        for begin, end in sorted(self._operations):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    def add_operation(self, op: str, begin: float, end: float, num_bytes: int) -> None:
        """An operation was in flight, on any thread."""
        if self._computing_thread is not None:  # else nobody waits for it
            self._operations.append((begin, end))
        self._keep(Span("communication", op, begin, end, self._step, num_bytes))

    def record(self) -> None:
        """Keep spans from now on."""
        self._is_recording = True

    def pause(self) -> None:
        """Keep no spans from now on."""
        self._is_recording = False

    def take_rows(self) -> list[dict[str, Any]]:
        """Pause, and return and forget the recorded spans: for JSON, in wall-clock time, which all ranks share."""
        self.pause()
        spans, self._spans = self._spans, []
        to_wall_clock = time.time() - time.perf_counter()
        return [
            {
                "step": span.step, "kind": span.kind, "name": span.name, "begin": round(span.begin + to_wall_clock, 6),
                "seconds": round(span.end - span.begin, 6), "bytes": span.bytes,
            }
            for span in spans
        ]  # fmt: skip

    def _keep(self, span: Span) -> None:
        if self._is_recording:
            self._spans.append(span)
