"""Communication while the main thread computes: one thread for each group, which runs functions in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.comm.ledger import Ledger, Purpose

T = TypeVar("T")
CLOSE_SECONDS = 2.0


class BackgroundWork(Generic[T]):
    """A function that runs on another thread. `wait` returns its result, or raises its error."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.future: Future[T] = Future()

    def run(self, work: Callable[[], T]) -> None:
        """Run the function on the current thread and keep its result or its error."""
        try:
            self.future.set_result(work())
        except BaseException as error:
            self.future.set_exception(error)

    def wait(self) -> T:
        """Block until it is done. Only the time in which an operation was in flight counts as waiting."""
        begin = time.perf_counter()
        try:
            return self.future.result()
        finally:
            self.ledger.timeline.add_waiting_for_background(begin, time.perf_counter())


class CommThread:
    """One thread that runs functions in order. It is a daemon: a process can end while it waits for a lost peer.

    It computes on one core. torch would give it a pool of threads. Such pools wait by spinning, so two of them would
    compete for the cores and slow down each other several times.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self._work: queue.SimpleQueue[tuple[Purpose, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, run: Callable[[], None]) -> None:
        """Run a function after all earlier ones, under the caller's present purpose."""
        if not self._thread.ident:
            cores = torch.get_num_threads()
            self._thread.start()
            self._ready.wait()
            torch.set_num_threads(cores)  # the new thread's setting is also the default of later threads
        self._work.put((self.ledger.current_purpose, run))

    def stream(self, device: torch.device, ready: torch.cuda.Event | None) -> AbstractContextManager[Any]:
        """On a GPU, use a stream of this thread that waits for the event `ready`; on a CPU (None), do nothing."""
        if ready is None:
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_event(ready)
        return torch.cuda.stream(self._streams[device])

    def close(self) -> None:
        """End the thread once it has run everything; if it waits for a lost peer, return after a moment."""
        self._work.put(None)
        if self._thread.ident:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        torch.get_num_threads()  # else torch would overwrite the setting when this thread first computes
        torch.set_num_threads(1)
        self._ready.set()
        while (item := self._work.get()) is not None:
            purpose, run = item
            with self.ledger.purpose(purpose):
                run()
            del item, run  # free the tensors that it refers to before waiting for the next one


def keep_for_stream(tensors: Iterable[Tensor]) -> None:
    """Keep the memory of tensors that are about to be freed until the current stream has read them.

    Without it, the allocator would hand out the memory of a tensor that another stream made as soon as it is freed.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after everything that a GPU's current stream was given; None on a CPU, which is not asynchronous."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
