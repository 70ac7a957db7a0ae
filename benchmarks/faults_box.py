"""Where runs of benchmarks/faults.py live: in folders and a mount namespace of their own.

The namespace has a /dev/shm of its own and a small disk that can be filled. Every process that a run starts is in it,
and no other is, so what a run leaves behind is found whatever its parent is by then.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import programs  # noqa: E402

POLL_SECONDS = 0.003
LEFT_SECONDS = 3.0  # that processes may go on after their run has ended
DISK_BYTES = 2**24
KEEPER = "thinwire.netlab.keeper"
SCRAPS = re.compile(r"^\.|\.(new|tmp)$")  # names of files that were not written to their end


class Ended(NamedTuple):
    """How a run ended."""

    code: int | None  # None: it did not end in time and was ended
    seconds: float
    text: str  # what it wrote to stderr
    left: list[str]  # processes that were there for too long after its end


class Box:
    """Folders and a namespace for the runs of one cell."""

    all: ClassVar[set[Box]] = set()  # those that are open

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        Box.all.add(self)
        disk = folder / "disk"
        for one in (folder, disk):
            one.mkdir()
        self._user = os.getuid() != 0
        script = (
            f"mount -t tmpfs -o size={DISK_BYTES} none {disk} && mount -t tmpfs none /dev/shm && echo ready && read _"
        )
        unshare = ["unshare", "--mount", *(["--user", "--map-root-user"] if self._user else []), "sh", "-c", script]
        self._holder = subprocess.Popen(unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise SystemExit("mount namespaces are not allowed here; run as root, or allow user namespaces")
        proc = f"/proc/{self._holder.pid}"
        self._mounts, self._user_path = f"{proc}/ns/mnt", f"{proc}/ns/user" if self._user else None
        self._id = os.readlink(self._mounts)
        self.disk = disk  # its path for programs inside
        self.disk_seen = Path(f"{proc}/root{disk}")  # and for those outside
        self.temporary = self.disk_seen / "tmp"  # on the disk that may be full
        self.temporary.mkdir()
        self._shared_memory = Path(f"{proc}/root/dev/shm")

    def close(self) -> None:
        """End all its processes. The namespace, with disk and shared memory, goes with the last one."""
        Box.all.discard(self)
        if self._holder.poll() is None:
            self.end_processes()
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait()

    # ---- processes

    def processes(self) -> list[int]:
        """The processes of runs, the oldest first."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(path / "ns" / "mnt") == self._id:
                    found.append(int(path.name))
        return sorted(pid for pid in found if pid != self._holder.pid)

    def end_processes(self) -> None:
        """Kill every process of runs."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def processes_left(self) -> list[str]:
        """The command lines of processes that do not end within the time allowed; they are then ended."""
        deadline = time.monotonic() + LEFT_SECONDS
        while time.monotonic() < deadline:
            if not self.processes():
                return []
            time.sleep(0.05)
        left = [f"process: {name}" for pid in self.processes() if (name := command_of(pid))]
        self.end_processes()
        return left

    # ---- what else may be left

    def files_left(self, out: Path) -> list[str]:
        """Temporary files and folders, shared memory, and files of the run that were not written to their end."""
        places = {"temporary": self.temporary, "shared memory": self._shared_memory}
        left = [f"{place}: {path.name}" for place, folder in places.items() for path in sorted(folder.iterdir())]
        left += [f"run: {path.name}" for path in sorted(out.rglob("*")) if SCRAPS.search(path.name)]
        tensors = sorted(out.rglob("rank-*.safetensors"))
        return left + [f"run: {one.name} of no checkpoint" for one in tensors if not one.with_suffix(".json").exists()]

    # ---- runs

    @contextmanager
    def run(self, settings: Sequence[str], env: dict[str, str], quick: bool) -> Iterator[Running]:
        """Start `thinwire train`; `quick` from a process that has imported torch. What is left at the end is ended."""
        words = ["-m", "thinwire", "train", *settings]
        every = {
            "PATH": os.environ["PATH"], "HOME": str(self.folder), "LANG": "C.UTF-8", "COLUMNS": "200",
            "TMPDIR": str(self.disk / "tmp"), "PYTHONPATH": f"{ROOT}/benchmarks:{ROOT}/src", "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"), **env,
        }  # fmt: skip
        if quick:
            command = [*programs.python_in(self._mounts, self._user_path), *words]
        else:
            enter = ["nsenter", f"--mount={self._mounts}"]
            enter += [f"--user={self._user_path}", "--preserve-credentials"] if self._user else []
            command = [*enter, sys.executable, *words]
        errors = self.folder / "errors"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                command, env=every, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
        try:
            yield Running(self, process, errors)
        finally:
            self.end_processes()
            process.wait()


class Running:
    """A run that was started."""

    def __init__(self, box: Box, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.box, self._process, self._errors = box, process, errors
        self.began = time.monotonic()
        self._launcher: int | None = None

    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def has_ended(self) -> bool:
        """Whether its launcher has ended."""
        return self._process.poll() is not None

    def wait_until(self, holds: Callable[[], Any], deadline: float) -> bool:
        """Wait until something holds; False if the run ended before, or a number of seconds after its start."""
        while not holds():
            if self.has_ended() or self.seconds() > deadline:
                return bool(holds())
            time.sleep(POLL_SECONDS)
        return True

    def launcher(self) -> int | None:
        """The process of the launcher: the first in the namespace, so its parent is outside. None after its end."""
        while self._launcher is None and not self.has_ended():
            pids = self.box.processes()
            self._launcher = next((pid for pid in pids if parent_of(pid) not in pids), None)
        return self._launcher

    def ranks(self) -> list[int]:
        """The processes of the ranks that are there, in their order: the children of the launcher's fork server."""
        launcher = self.launcher()
        servers = [pid for pid in children(launcher) if KEEPER not in command_of(pid)] if launcher else []
        return [pid for server in servers for pid in children(server)]

    def keeper(self) -> int | None:
        """The process that holds the hosts of netlab."""
        found = (pid for pid in self.box.processes() if KEEPER in command_of(pid))
        return next(found, None)

    def end(self, deadline: float) -> Ended:
        """Wait for its end, at most so many seconds after its start, and see what is left of its processes."""
        while not self.has_ended() and self.seconds() < deadline:
            time.sleep(POLL_SECONDS)
        seconds = self.seconds()
        if not self.has_ended():
            self.box.end_processes()
            self._process.wait()
            return Ended(None, seconds, self.text(), [])
        return Ended(self._process.returncode, seconds, self.text(), self.box.processes_left())

    def text(self) -> str:
        """What it has written to stderr so far."""
        return self._errors.read_text(errors="replace")


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def children(pid: int) -> list[int]:
    """The children of a process, the oldest first."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return sorted(found)
