"""When a rank computed, talked and waited. Waiting is always added up; spans are kept for a few steps only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

Kind = Literal["step", "waiting", "communication"]


class Span(NamedTuple):
    """Something that took a while, on the clock of time.perf_counter."""

    kind: Kind
    name: str
    begin: float
    end: float
    step: int
    bytes: int = 0


class Timeline:
    """One rank's use of time.

    Inside of `step`, the thread that computes is waiting while it is in an operation of a Comm, or for one.
    Other threads may talk meanwhile: that is communication, but nobody waits for it.

    >>> timeline = Timeline()
    >>> with timeline.step(0):
    ...     timeline.waited(1.0, 1.5)
    >>> timeline.waiting_seconds
    0.5
    """

    def __init__(self) -> None:
        self.waiting_seconds = 0.0
        self._computing: int | None = None  # the thread that does, inside of a step
        self._step = 0
        self._spans: list[Span] = []
        self._recording = False
        self._talks: list[tuple[float, float]] = []  # operations of this step, on whatever thread

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A training step, on the thread that computes."""
        begin = time.perf_counter()
        self._step = number
        self._talks = []
        self._computing = threading.get_ident()
        try:
            yield
        finally:
            self._computing = None
            self._keep(Span("step", "", begin, time.perf_counter(), number))

    @property
    def computing_here(self) -> bool:
        """Is the present thread the one that computes, and in a step?"""
        return self._computing == threading.get_ident()

    def waited(self, begin: float, end: float) -> None:
        """The computing thread stood still. Of another thread this is nobody's loss, and not counted."""
        if self.computing_here:
            self.waiting_seconds += end - begin
            self._keep(Span("waiting", "", begin, end, self._step))

    def waited_for_talks(self, begin: float, end: float) -> None:
        """The computing thread stood still while another was talking, now and then: only that is waiting.

        What the other thread does between operations, such as copying or compressing, is computing.
        """
        for talk_begin, talk_end in sorted(self._talks):
            if talk_begin < end and talk_end > begin:
                self.waited(max(begin, talk_begin), min(end, talk_end))
                begin = min(end, talk_end)  # two may go on at once

    @property
    def talking_seconds(self) -> float:
        """How long operations took in this step."""
        return sum(end - begin for begin, end in self._talks)

    def communicated(self, op: str, begin: float, end: float, num_bytes: int) -> None:
        """An operation was under way, on whatever thread."""
        self._talks.append((begin, end))
        self._keep(Span("communication", op, begin, end, self._step, num_bytes))

    def record(self) -> None:
        """Keep spans from now on."""
        self._recording = True

    def pause(self) -> None:
        """Keep no more."""
        self._recording = False

    def recorded(self) -> list[dict[str, Any]]:
        """The spans that were kept, in wall-clock time so that ranks can be laid side by side; keeps no more."""
        self.pause()
        to_wall_clock = time.time() - time.perf_counter()
        return [
            {
                "step": span.step, "kind": span.kind, "name": span.name, "begin": round(span.begin + to_wall_clock, 6),
                "seconds": round(span.end - span.begin, 6), "bytes": span.bytes,
            }
            for span in self._spans
        ]  # fmt: skip

    def _keep(self, span: Span) -> None:
        if self._recording:
            self._spans.append(span)
