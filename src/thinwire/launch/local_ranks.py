"""The processes of the ranks, as torch's elastic agent watches them, with an end that no rank can hold up."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class Finished:
    """What ranks that have done their work wait for: that the launcher has read every result.

    torch takes an Event of multiprocessing. Its `set` waits until each process that it wakes is awake, so it waits for
    ever if one was killed just before.
    """

    def __init__(self) -> None:
        self.reader, self.writer = multiprocessing.get_context("forkserver").Pipe(duplex=False)

    def __getstate__(self) -> Any:
        return self.reader  # ranks do not get the other end, so they go on too when the launcher has ended

    def __setstate__(self, reader: Any) -> None:
        self.reader = reader

    def set(self) -> None:
        """Let all go on."""
        self.writer.send_bytes(b"read")

    def wait(self) -> None:
        """Wait for `set`. Nobody takes the message out of the pipe, so all see it."""
        self.reader.poll(None)


class LocalRanks(elastic.MultiprocessContext):
    """torch's context of processes with `Finished` in place of its event. A rank that ends without a result has failed.

    torch takes an exit code of 0 for no failure, and would wait for ever for the result.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._worker_finished_event: Any = Finished()

    def _poll(self) -> Any:
        found = super()._poll()
        assert self._pc is not None
        left = [rank for rank, process in enumerate(self._pc.processes) if process.exitcode == 0]
        if found is not None or not left:
            return found
        self.close()
        failure = ProcessFailure(left[0], self._pc.pids()[left[0]], 0, self.error_files[left[0]])
        return elastic.RunProcsResult(failures={left[0]: failure}, stdouts=self.stdouts, stderrs=self.stderrs)


@contextmanager
def local_ranks() -> Iterator[None]:
    """Inside, torch's agents start ranks in this way."""
    module: Any = elastic
    before, module.MultiprocessContext = module.MultiprocessContext, LocalRanks
    try:
        yield
    finally:
        module.MultiprocessContext = before
