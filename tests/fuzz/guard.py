"""What a fuzz case may not do: execute code, start processes, connect, write or read elsewhere, hang, take memory."""

from __future__ import annotations

import os
import resource
import signal
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CASE_CPU_SECONDS = 5.0
CASE_MEMORY = 2**30  # that a case may take, in address space
SOURCES = tuple(
    {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        str(Path(__file__).parents[2] / "src"),
        str(Path(__file__).parent),
        *(os.path.realpath(path) for path in sys.path if path.endswith("site-packages")),
    }
)
READABLE = (*SOURCES, "/proc/", "/sys/", "/dev/null", "/dev/urandom", sys.base_prefix)
LIBRARIES = {
    "thinwire",
    "tests",
    "torch",
    "numpy",
    "scipy",
    "pydantic",
    "pydantic_core",
    "safetensors",
    "rich",
    "jinja2",
    "plotly",
    "filelock",
    "sklearn",
    "cyclopts",
}
EXECUTING = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "ctypes.dlopen",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "urllib.Request",
    "code.__new__",
)
CHANGING = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
    "shutil.move",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Refused(BaseException):
    """A case did what none may do. No `except Exception` catches it."""


class Guard:
    """Watches the process by an audit hook, which stays; it looks only while a case runs."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = str(scratch.resolve())
        self.is_watching = False
        self.found: list[str] = []
        sys.addaudithook(self._hook)
        signal.signal(signal.SIGPROF, _out_of_time)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + CASE_MEMORY, -1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, one case runs."""
        self.found = []
        signal.setitimer(signal.ITIMER_PROF, CASE_CPU_SECONDS)
        self.is_watching = True
        try:
            yield
        finally:
            self.is_watching = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        if self.found:  # also where the case went on after it
            raise Refused(self.found[0])

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_watching and (why := self._why_refused(event, args)):
            self.found.append(why)
            raise Refused(why)

    def _why_refused(self, event: str, args: tuple[Any, ...]) -> str:
        if event == "exec":
            return _why_not_executed(args[0])
        if event == "compile":
            caller = sys._getframe(2).f_code.co_filename
            is_parsing = caller.endswith(("/ast.py", "/typing.py", "/annotationlib.py")) or "importlib" in caller
            is_own = caller.endswith(("/dataclasses.py", "/collections/__init__.py", "/enum.py"))
            return "" if is_parsing or is_own else f"compiles {str(args[0])[:80]!r} for {caller}"
        if event == "open":
            return self._why_not_opened(*args)
        if event in CHANGING:
            paths = [one for one in args[:2] if isinstance(one, str | bytes | os.PathLike)]
            return "".join(f"{event} of {path!r} " for path in paths if not self._is_inside(path, (self.scratch,)))
        if event == "marshal.loads":  # how a module is read that was compiled before
            return "" if "importlib" in sys._getframe(2).f_code.co_filename else "marshal.loads"
        return f"{event}{args!r}"[:300] if event.startswith(EXECUTING) else ""

    def _why_not_opened(self, path: Any, mode: str | None, flags: int) -> str:
        if isinstance(path, int):
            return ""
        is_written = bool(flags & WRITING) or any(letter in (mode or "") for letter in "wax+")
        allowed = (self.scratch,) if is_written else (self.scratch, *READABLE)
        return "" if self._is_inside(path, allowed) else f"opens {path!r} ({mode or flags})"

    def _is_inside(self, path: Any, folders: tuple[str, ...]) -> bool:
        whole = os.path.realpath(os.fsdecode(path))
        return any(whole.startswith(folder) for folder in folders) or os.fspath(path) in ("/dev/null", b"/dev/null")


def _why_not_executed(code: CodeType) -> str:
    """Modules of the libraries are loaded when they are first used, and annotations of our own source are evaluated."""
    frame: FrameType | None = sys._getframe(3)
    caller = frame.f_code.co_filename if frame else ""
    if caller.endswith(("/typing.py", "/annotationlib.py", "/dataclasses.py", "/collections/__init__.py", "/enum.py")):
        return ""
    if "importlib" in caller and code.co_filename.startswith(SOURCES):
        top = Path(code.co_filename)
        is_library = any(library in top.parts for library in LIBRARIES) or "site-packages" not in top.parts
        return "" if is_library and not _is_trap(top) else f"imports {code.co_filename}"
    return f"executes {code.co_name} of {code.co_filename} for {caller}"


TRAPS = ("antigravity", "this", "turtle", "idlelib", "fuzz_trap")  # modules that only data names


def _is_trap(path: Path) -> bool:
    return path.stem in TRAPS or any(part in TRAPS for part in path.parts)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise Refused(f"computes for more than {CASE_CPU_SECONDS:g} s")


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the files of cases."""
    return tempfile.TemporaryDirectory(prefix="tw-fuzz-")
