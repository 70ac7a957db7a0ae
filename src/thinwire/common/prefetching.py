"""Items that a background thread makes ahead of their use, and batches that are copied to a GPU while it computes."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.common.batches import map_tensors

T = TypeVar("T")
EXIT_SECONDS = 2.0  # that a process which ends waits for a thread: it may wait for a stream that gives nothing


def made_ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order, made by a background thread, up to `depth` of them ahead of their use.

    An error of the iterator is raised when its turn comes. The thread ends with the items, when this is closed, or
    before Python ends: a thread that computes while Python ends would abort the process.

    >>> list(made_ahead(iter(range(5))))
    [0, 1, 2, 3, 4]
    """
    maker = _Maker(items, depth)
    at_exit = functools.partial(maker.stop, EXIT_SECONDS)
    atexit.register(at_exit)
    try:
        while True:
            item, error = maker.made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            maker.free.release()
            yield item  # type: ignore[misc]
    finally:
        atexit.unregister(at_exit)
        maker.stop()


class _Maker(Generic[T]):
    """The thread of `made_ahead`."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.items = items
        self.made: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
        self.free = threading.Semaphore(depth)  # places for items that are made and not yet used
        self.started, self.closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="prefetching", daemon=True)
        num_threads = torch.get_num_threads()
        self.thread.start()
        self.started.wait()
        torch.set_num_threads(num_threads)  # the new thread's setting is also the default of later threads

    def _run(self) -> None:
        torch.get_num_threads()  # else torch would overwrite the setting when this thread first computes
        torch.set_num_threads(1)  # a pool of threads would compete with that of the computing thread
        self.started.set()
        try:
            while self.free.acquire() and not self.closed.is_set():
                self.made.put((next(self.items), None))
        except BaseException as error:  # StopIteration at the end
            self.made.put((None, error))

    def stop(self, seconds: float | None = None) -> None:
        """End the thread, after the item that it is making; wait for that, at most so long."""
        self.closed.set()
        self.free.release()
        self.thread.join(seconds)


def copied_to_gpu(batches: Iterator[Any], device: torch.device, in_background: bool) -> Generator[Any, None, None]:
    """The same batches on a GPU. Copies are made from pinned memory, on a stream of their own, beside the computing.

    With `in_background` a thread reads the batches ahead. Without it each is read when it is asked for, so that random
    numbers which the reading draws keep their place among those of the training.
    """
    stream = torch.cuda.Stream(device)

    def start_copy(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copied = map_tensors(batch, lambda t: t if t.is_cuda else t.pin_memory().to(device, non_blocking=True))
            return copied, stream.record_event()

    started = map(start_copy, batches)
    for batch, is_copied in made_ahead(started) if in_background else started:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(is_copied)
        yield map_tensors(batch, functools.partial(_keep_for, computing))


def _keep_for(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    """The tensor; its memory is not used again before this stream has done what it is given to do with it."""
    tensor.record_stream(stream)
    return tensor
