"""Fixtures, and a check after every test that it left nothing running and nothing changed."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, and it sets an environment variable
import torch.distributed as dist

from tests import programs
from tests.worlds import ProcessWorlds, on_threads
from thinwire.comm.base import Comm

torch.set_num_threads(1)  # tests run beside each other, one a core


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder() -> Iterator[None]:
    """What tests start has a folder of its worker's: comparisons in two of them need not wait for each other."""
    before = os.environ.get("TMPDIR", tempfile.gettempdir())  # which this process goes on with
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
    for name in {"world", "program_server"} & set(request.fixturenames):
        request.getfixturevalue(name)  # its processes are there before we look
    threads, children, environment = set(threading.enumerate()), _children(), dict(os.environ)
    yield
    environment["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    changed = {k for k in {*os.environ, *environment} if os.environ.get(k) != environment.get(k)}
    assert not changed, f"environment changed: {changed}"
    assert not dist.is_initialized(), "a process group was left standing"
    assert _eventually(lambda: set(threading.enumerate()) <= threads), (
        f"threads: {set(threading.enumerate()) - threads}"
    )
    assert _eventually(lambda: _children() <= children), f"processes left running: {_children() - children}"
