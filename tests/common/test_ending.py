"""Processes that end with another one."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from thinwire.common.fetching import fetch

pytestmark = pytest.mark.usefixtures("process_world")  # whose fork server stays


class Stuck(Dataset[Any]):
    """Samples that take for ever, as those of a network disk that does not answer."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __getitem__(self, index: int) -> Any:
        self.pipe.send_bytes(str(os.getpid()).encode())
        time.sleep(60)


def read(pipe: Connection) -> None:
    list(fetch(Stuck(pipe), [torch.tensor([0]), torch.tensor([1])], num_workers=2, seeds=[0, 1]))


def read_with_many_files(pipe: Connection) -> None:
    """As a rank that has a thousand files open, which its worker processes inherit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    file = os.open(os.devnull, os.O_RDONLY)
    while os.dup(file) < 1100:
        pass
    read(pipe)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("program", ["read", "read_with_many_files"])
def test_processes_that_read_samples_end_with_the_one_that_was_killed(program: str) -> None:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    rank = context.Process(target=globals()[program], args=(there,))
    rank.start()
    there.close()
    workers = [int(here.recv_bytes()) for _ in range(2)]
    assert all(map(is_there, workers))
    rank.kill()
    rank.join()
    deadline = time.monotonic() + 3
    while any(map(is_there, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_there, workers))
