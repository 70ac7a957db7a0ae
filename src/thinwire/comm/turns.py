"""Recorded ranks take turns, and leave messages for each other on a board."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from thinwire.comm.board import Board
from thinwire.comm.process_groups import ProcessGroup
from thinwire.comm.trace import Channel, Trace


class Turns:
    """Recorded ranks take turns: one runs at a time, so that the time it takes is its own."""

    def __init__(self, ranks: Sequence[int], group: ProcessGroup | None = None) -> None:
        self.ranks = frozenset(ranks)
        self.group = group  # of this process alone, for DDP, if that is to be timed too
        self.board = Board(len(ranks))
        self.turn = threading.Lock()
        self.unfinished: dict[tuple[Trace, Channel], list[Any]] = {}  # tasks in order

    def finish(self, trace: Trace) -> None:
        """Run the tasks of a rank that it has not waited for."""
        for (owner, _), tasks in self.unfinished.items():
            while owner is trace and tasks:
                tasks.pop(0).run_now()

    @contextmanager
    def resting(self, trace: Trace) -> Iterator[None]:
        """Inside, other ranks may run."""
        pause = trace.lap()
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()
            trace.skip()
            trace._since -= pause
