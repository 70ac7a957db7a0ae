"""Files that are written completely or not at all, and a temporary folder."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.errors import RunError


def scratch_prefix() -> str:
    """What names of temporary folders of this process begin with, so that others know when nobody needs them."""
    return f"thinwire-{os.getpid()}-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end. Those that killed processes of this user left behind are removed too."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob("thinwire-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists() and left.lstat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)  # does not follow a symbolic link
    with tempfile.TemporaryDirectory(prefix=scratch_prefix()) as path:
        yield Path(path)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file in the folder of `path`, then rename it. On failure, `path` is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def add_text(path: Path, text: str) -> None:
    """Add to a text file, and wait until it is on the disk. If that fails, the last line may be incomplete."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> RunError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error)
    remedy = "free some space and --resume" if full else "choose another --out"
    return RunError(f"cannot write {path}: {error.strerror or error}; {remedy}. What was written before is untouched")
