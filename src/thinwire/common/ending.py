"""Processes that end with another one."""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
from contextlib import suppress


def end_with(pid: int) -> None:
    """Wait until a process has ended, and end this one, which would otherwise be left behind if that was killed."""
    with suppress(OSError):  # it has ended already
        ended = select.poll()  # select.select takes no descriptor above 1023
        ended.register(os.pidfd_open(pid), select.POLLIN)  # readable once it has ended
        ended.poll()
    os._exit(1)


def end_with_parent(worker: int) -> None:
    """In a worker process of a DataLoader: end with the process that started it, also while a sample is read.

    torch looks for it every 5 s, and between two batches only.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    if hasattr(os, "pidfd_open"):  # Linux
        threading.Thread(target=end_with, args=(parent.pid,), name="thinwire-end", daemon=True).start()
