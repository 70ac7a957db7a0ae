"""Stop a run in good time, where it can go on from a checkpoint of the end of an epoch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cifar10.packing import complete_steps

from thinwire.config import RunConfig
from thinwire.run.records import RunFolder, read_rows

POLL_SECONDS = 0.2


@dataclass
class Watch:
    """Watches the checkpoints of a run, and stops this process's run when the next epoch would end too late."""

    folder: RunFolder
    config: RunConfig
    deadline: float
    has_stopped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Until the run has ended: after each new checkpoint, compare the last epoch's time with what is left."""
        steps = self._newest_step()
        while not self.ended.wait(POLL_SECONDS):
            newest = self._newest_step()
            is_new, steps = newest != steps, newest
            if time.monotonic() >= self.deadline or (is_new and self._is_next_epoch_too_long()):
                self.has_stopped = True
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _newest_step(self) -> list[int]:
        return complete_steps(self.folder, self.config.ranks or 1)[-1:]

    def _is_next_epoch_too_long(self) -> bool:
        """Whether there is a next epoch, and it would end after the deadline if it takes as long as the last one."""
        rows = read_rows(self.folder.metrics)
        begin, end = ([0.0] + [row["seconds"] for row in rows])[-2:]
        return rows[-1]["epoch"] < (self.config.epochs or 0) and time.monotonic() + end - begin > self.deadline


@contextmanager
def stopped_in_time(folder: RunFolder, config: RunConfig, deadline: float) -> Iterator[Watch]:
    """Inside, Stopped is raised when the next epoch would end after the deadline, or at the deadline.

    To be used where SIGTERM raises Stopped.
    """
    watch = Watch(folder, config, deadline)
    thread = threading.Thread(target=watch.watch, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        thread.join()
