"""One comparison at a time on a machine: a lock file for each user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        lock.acquire(blocking=False)
    except Timeout:
        _wait(lock, path)
    except OSError as error:
        print_line(f"warning: cannot lock {path} ({error.strerror}): make sure that no other comparison runs here")
    if lock.is_locked:
        _note_owner(path)
    try:
        yield
    finally:
        lock.release()


def _wait(lock: FileLock, path: Path) -> None:
    owner = ""
    with suppress(OSError):
        owner = path.read_text().strip()
    print_line(
        f"waiting for another comparison on this machine (process {owner or '?'}) to end; two at once would distort "
        "each other's times"
    )
    lock.acquire(poll_interval=POLL_SECONDS)


def _note_owner(path: Path) -> None:
    """Write this process's number into the lock file, for whoever waits; never through a link."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            os.write(file, str(os.getpid()).encode())
        finally:
            os.close(file)
