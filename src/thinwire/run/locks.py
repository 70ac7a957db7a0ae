"""One run at a time writes to a folder: rank 0 locks a file in it."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from thinwire.common.messages import print_line

LOCK = ".run.lock"
State = Literal["held", "taken", "unknown"]


class FolderLock:
    """A file in a folder, which is there and locked while a run writes to the folder; a killed run leaves it behind.

    The folder itself would not do: NFS passes on locks of files that are open for writing. On a folder it has locks
    that other machines do not see.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._descriptor: int | None = None

    def take(self) -> State:
        """Lock the folder, until `release` or until the process ends. "unknown", with a warning, if it has no locks."""
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            _open.add(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state: State = "held" if _is_file(self._descriptor, self.path) else "taken"
        except (BlockingIOError, FileNotFoundError):  # the second: a run that failed has removed the folder
            state = "taken"
        except OSError as error:
            state = "taken" if error.errno == errno.ESTALE else "unknown"  # stale: removed on another machine
            if state == "unknown":
                why = f"cannot lock {self.path} ({error.strerror})"
                print_line(f"warning: {why}: make sure that no other run writes to this folder")
        if state != "held":
            self._close()
        return state

    def release(self) -> None:
        """Let others lock the folder."""
        if self._descriptor is not None:
            with suppress(OSError):
                if _is_file(self._descriptor, self.path):
                    self.path.unlink()
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing it would not do, if another process has a copy
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            _open.discard(self)
            os.close(self._descriptor)
            self._descriptor = None


_open: set[FolderLock] = set()  # of this process


def _close_in_child() -> None:
    """A process that this one forks may go on for longer: it must not keep the lock."""
    for lock in list(_open):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path: the run that held it before has removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
