"""Talking beside the computation: one thread per group that does what it is given, in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from thinwire.comm.ledger import Ledger, Purpose

T = TypeVar("T")
CLOSE_SECONDS = 2.0


class BackgroundWork(Generic[T]):
    """Something under way that uses a group. `wait` gives its result, or raises what it raised."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.future: Future[T] = Future()

    def run(self, work: Callable[[], T]) -> None:
        """Do it, on this thread."""
        try:
            self.future.set_result(work())
        except BaseException as error:
            self.future.set_exception(error)

    def wait(self) -> T:
        """Stand still until it is done; the part of that in which it was talking is waiting for the network."""
        begin = time.perf_counter()
        try:
            return self.future.result()
        finally:
            self.ledger.timeline.waited_for_talks(begin, time.perf_counter())


class CommThread:
    """One thread that does what it is given, in order. It ends with the process, whatever it is waiting for.

    It computes on one core: a team of its own, as torch would give it, takes the cores away from the computation and,
    because teams wait for work by spinning, slows down both of them several times.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self._work: queue.SimpleQueue[tuple[Purpose, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, run: Callable[[], None]) -> None:
        """Have a function run, after all earlier ones, under the purpose that the caller has now."""
        if not self._thread.ident:
            cores = torch.get_num_threads()
            self._thread.start()
            self._ready.wait()
            torch.set_num_threads(cores)  # its setting is also that of threads to come
        self._work.put((self.ledger.current_purpose, run))

    def stream(self, device: torch.device, ready: torch.cuda.Event | None) -> AbstractContextManager[Any]:
        """On a GPU, work on a stream of this thread's own, after what it needs is ready."""
        if ready is None:
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_event(ready)
        return torch.cuda.stream(self._streams[device])

    def close(self) -> None:
        """End the thread once it has done everything. One that waits for a lost peer is left to the process's end."""
        self._work.put(None)
        if self._thread.ident:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        torch.get_num_threads()  # else torch would set it anew when this thread first needs it
        torch.set_num_threads(1)
        self._ready.set()
        while (item := self._work.get()) is not None:
            purpose, run = item
            with self.ledger.purpose(purpose):
                run()
            del item, run  # and with it what it refers to, before the next one comes


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """What a GPU was told to do until now, to wait for; None on a CPU, which has done it."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
