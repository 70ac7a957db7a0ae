"""One comparison at a time on a machine: a lock file for each user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from thinwire.common.messages import print_line

POLL_SECONDS = 0.25


@contextmanager
def machine_lock() -> Iterator[None]:
    """Wait until no other comparison of this user runs on this machine, and keep others waiting inside the block.

    Two comparisons at once would distort each other's times. Where the lock file cannot be made, a warning is printed
    and the comparison goes on.
    """
    path = Path(tempfile.gettempdir(), f"thinwire-compare-{os.getuid()}.lock")
    lock = FileLock(path, mode=0o600)
    try:
        _acquire(lock, path)
    except OSError as error:
        print_line(f"warning: cannot lock {path} ({error.strerror}): make sure that no other comparison runs here")
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, path: Path) -> None:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print_line(
            f"waiting for another comparison on this machine (process {path.read_text().strip() or '?'}) to end; "
            "two at once would distort each other's times"
        )
        lock.acquire(poll_interval=POLL_SECONDS)
    path.write_text(str(os.getpid()))
