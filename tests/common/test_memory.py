"""Memory that was freed stays with the process, for the next step."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from thinwire.common.memory import keep_freed_memory

PROGRAM = """
import sys, threading
import torch
from thinwire.common.memory import keep_freed_memory

def work():
    blocks = [torch.ones(5 * 2**20) for _ in range(10)]  # of 20 MiB
    del blocks
    with open("/proc/self/statm") as file:
        resident.append(int(file.read().split()[1]) * 4096 >> 20)

kept, resident = sys.argv[1] == "keep" and keep_freed_memory(), []
work()
for _ in range(2):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(kept, min(resident))
"""


def ran(keep: bool) -> tuple[str, int]:
    """Whether settings were made, and the least MiB that a process has after freeing 200, on this and other threads."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    program = [sys.executable, "-c", PROGRAM, "keep" if keep else "leave"]
    ended = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=True)
    kept, resident = ended.stdout.split()
    return kept, int(resident)


def test_freed_blocks_are_kept_on_every_thread() -> None:
    kept, resident = ran(keep=True)
    assert kept == "True"
    assert resident > ran(keep=False)[1] + 150


def test_settings_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda name, value: 1))
    assert keep_freed_memory.__wrapped__(), "without settings of the user's own"
    for name, value in (("MALLOC_ARENA_TEST", "8"), ("GLIBC_TUNABLES", "glibc.malloc.arena_test=8")):
        with monkeypatch.context() as given:
            given.setenv(name, value)
            assert not keep_freed_memory.__wrapped__()
