"""Fixtures, the order of the tests and which of them are quick; and each test must leave nothing running or changed."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, and it sets an environment variable
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests import programs
from tests.worlds import ProcessWorlds, on_threads
from thinwire.comm.base import Comm

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that programs which they start can be interrupted
torch.set_num_threads(1)  # tests run beside each other, one a core
os.environ["OMP_NUM_THREADS"] = "1"  # so do the programs that they start
with suppress(ImportError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # a thread that torch's compiler would start with its first progress bar
settings.register_profile("no times", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no times")  # machines are shared: a test fails for what is wrong, never for how long it took


# ---- which tests are quick, and their order

SHARE = 10  # of a test with parameters, make quick runs one of so many cases
PROCESS_FIXTURES = {"program_server", "process_world"}
PROCESS_NAMES = {"subprocess", "multiprocessing", "sync_playwright", "ends_of"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: one of the tests of make quick (set in conftest.py)")
    config.addinivalue_line("markers", "slow: starts no process, but takes too long for make quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, and run the longest first, so that no worker is left with one at the end."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not _starts_processes(item) and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # a mixture, and always the same
        for item in cases[: -(-len(cases) // SHARE)]:
            item.add_marker(pytest.mark.quick)
    items.sort(key=_order)


def pytest_collection_finish() -> None:
    """What is imported by now stays. Python's search for garbage passes over it: else it takes 0.2 s each time."""
    gc.collect()
    gc.freeze()


def _order(item: pytest.Item) -> tuple[float, bool]:
    """First what may take longer than others, then what starts programs, then the rest as it is in the files."""
    timeout = item.get_closest_marker("timeout")
    return -(timeout.args[0] if timeout else 0.0), "program_server" not in getattr(item, "fixturenames", ())


def _starts_processes(item: pytest.Item) -> bool:
    """Whether a test starts a process, by its fixtures or in a function of the tests that it calls."""
    if PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())):
        return True
    case = getattr(item, "callspec", None)
    return (case is not None and case.params.get("world") == "processes") or _mentions_processes(item.function)  # type: ignore[attr-defined]


@cache
def _mentions_processes(function: FunctionType) -> bool:
    seen: set[FunctionType] = set()
    todo = [inspect.unwrap(function)]
    while todo:
        one = todo.pop()
        seen.add(one)
        names = _names(one.__code__)
        if names & PROCESS_NAMES:
            return True
        called = (one.__globals__.get(name) for name in names)
        ours = {inspect.unwrap(c) for c in called if isinstance(c, FunctionType) and c.__module__.startswith("tests.")}
        todo += [c for c in ours if c not in seen]
    return False


def _names(code: CodeType) -> set[str]:
    """Names that a function uses, also in the functions inside it."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


# ---- fixtures


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(pytestconfig: pytest.Config) -> Iterator[None]:
    """Programs that tests start use a folder of this worker, so that comparisons of two workers do not wait for each
    other. What torch compiles is kept from one run of the tests to the next."""
    before = os.environ.get("TMPDIR", tempfile.gettempdir())  # which this process goes on with
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(pytestconfig.rootpath / ".pytest_cache" / "inductor")
    with tempfile.TemporaryDirectory(prefix="tw-") as folder:
        os.environ["TMPDIR"] = folder
        yield
    os.environ["TMPDIR"] = before


@pytest.fixture(scope="session")
def program_server() -> Iterator[None]:
    """What tests.programs starts programs from."""
    server = programs.start_server()
    yield
    try:
        server.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()


def _nothing(comm: Comm) -> None:
    pass


@pytest.fixture(scope="session")
def process_world() -> Iterator[ProcessWorlds]:
    worlds = ProcessWorlds()
    worlds.run(_nothing, 1)  # the fork server stays
    yield worlds
    worlds.close()


@pytest.fixture(params=["threads", "processes"])
def world(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """run(function, ranks, *args) → each rank's result: on threads, then on processes."""
    if request.param == "threads":
        return on_threads
    return request.getfixturevalue("process_world").run


def _children() -> set[int]:
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            pids |= {int(pid) for pid in path.read_text().split()}
    return pids


def _eventually(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a process group or a changed environment behind."""
    torch.manual_seed(0)  # what a test draws does not depend on the tests before it
    for name in {"world", "program_server"} & set(request.fixturenames):
        request.getfixturevalue(name)  # its processes are there before we look
    threads, children, environment = set(threading.enumerate()), _children(), dict(os.environ)
    yield
    environment["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    changed = {k for k in {*os.environ, *environment} if os.environ.get(k) != environment.get(k)}
    changed = {k for k in changed if not k.startswith("_TORCHINDUCTOR")}  # torch.compile's own notes
    assert not changed, f"environment changed: {changed}"
    assert not dist.is_initialized(), "a process group was left standing"
    assert _eventually(lambda: set(threading.enumerate()) <= threads), (
        f"threads: {set(threading.enumerate()) - threads}"
    )
    assert _eventually(lambda: _children() <= children), f"processes left running: {_children() - children}"
