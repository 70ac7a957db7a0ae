"""Files that are written completely or not at all, and temporary folders."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.errors import RunError

SHORT = "/tmp"  # where sockets go if the name of the folder for temporary files is too long for them
MOST_IN_NAME = 107  # bytes in the name of a socket, says Linux
SOCKET = "/listener-12345678"  # how multiprocessing names one in its folder


def scratch_prefix() -> str:
    """What names of temporary folders of this process begin with, so that others know when nobody needs them."""
    return f"thinwire-{os.getpid()}-{_machine()}-"


def _machine() -> str:
    """Where a process id belongs: machines and containers that share a folder count their processes separately."""
    place = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return f"{zlib.crc32(place.encode()):08x}"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end. Those that killed processes of this user left behind are removed too."""
    for parent in {tempfile.gettempdir(), SHORT}:
        for left in Path(parent).glob(f"thinwire-*-{_machine()}-*"):
            pid = left.name.split("-")[1]
            with suppress(OSError):  # somebody has just removed it
                if pid.isdigit() and not Path("/proc", pid).exists() and left.lstat().st_uid == os.getuid():
                    shutil.rmtree(left, ignore_errors=True)  # does not follow a symbolic link
    with tempfile.TemporaryDirectory(prefix=scratch_prefix()) as path:
        yield Path(path)


def folder_of_sockets() -> str:
    """A new temporary folder with a name that is short enough for sockets in it."""
    folder = tempfile.mkdtemp(prefix=scratch_prefix())
    if len(os.fsencode(folder + SOCKET)) <= MOST_IN_NAME:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=scratch_prefix(), dir=SHORT)


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
