"""Every connection of a group is to a rank that knows the secret, or the group is not used."""

from __future__ import annotations

import datetime
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import programs
from thinwire.comm import peers
from thinwire.comm.peers import check_peers
from thinwire.comm.secret import Secret
from thinwire.errors import RunError

SECRET, OTHER = Secret("a secret that no other program knows"), Secret("a secret that was changed yesterday")
TIMEOUT = datetime.timedelta(seconds=20)


def gloo(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group of one rank each; rank r listens at 127.0.0.(r + 1), so gloo connects from higher ranks to lower ones."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=f"127.0.0.{rank + 1}")]
    options._timeout, options._threads = TIMEOUT, 2
    group: Any = dist.ProcessGroup(store, rank, size)
    backend: Any = dist.ProcessGroupGloo(store, rank, size, options)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(peers.torch.device("cpu"), kind, backend)
    group._set_group_name("0")
    return group


def on_ranks(size: int, function: Callable[[dist.ProcessGroup], Any], before: Callable[[], None] = bool) -> list[Any]:
    """What a function of a group returns, or raises, on each rank. `before` is called while rank 0 listens alone."""
    store = dist.HashStore()

    def rank_of(rank: int) -> Any:
        group = gloo(store, rank, size)
        try:
            return function(group)
        except RunError as error:
            return error
        finally:
            group.shutdown()

    with ThreadPoolExecutor(size) as threads:
        first = threads.submit(rank_of, 0)
        before()
        rest = [threads.submit(rank_of, rank) for rank in range(1, size)]
        return [one.result(60) for one in (first, *rest)]


def test_ranks_that_know_the_secret_pass() -> None:
    assert on_ranks(3, lambda group: check_peers([group], SECRET)) == [None] * 3
    assert on_ranks(2, lambda group: check_peers([group], None)) == [None] * 2


def test_a_rank_with_another_secret_is_named_by_each_other_one() -> None:
    found = on_ranks(3, lambda group: check_peers([group], OTHER if group.rank() == 1 else SECRET))
    for rank, named in enumerate(["rank 1", "rank 0 and 2", "rank 1"]):
        assert f"on rank {rank}, the connection to {named} is one to somebody who does not know" in str(found[rank])


def own_ports(address: str) -> set[int]:
    """Ports at which this process listens at an address."""
    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    wanted = socket.inet_aton(address)[::-1].hex().upper()
    return {
        int(row[1].split(":")[1], 16)
        for row in rows
        if row[3] == "0A" and row[1].split(":")[0] == wanted and f"socket:[{row[9]}]" in own
    }


def take_the_place_of_others(held: ExitStack, before: set[int]) -> None:
    """Connect to rank 0 first, and say what the rank that it waits for would say first."""
    end = time.monotonic() + 10
    while not (ports := own_ports("127.0.0.1") - before) and time.monotonic() < end:
        time.sleep(0.01)
    for port in ports:
        for number in range(2):
            held.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(struct.pack("<q", number))
    time.sleep(0.2)


def meet_a_stranger() -> None:
    """Print what becomes of two ranks if a stranger takes the place of the second."""
    peers.CHECK_SECONDS = 1.0
    with ExitStack() as held:
        stranger = partial(take_the_place_of_others, held, own_ports("127.0.0.1"))
        for found in on_ranks(2, lambda group: check_peers([group], SECRET), stranger):
            print(type(found).__name__, found)


@pytest.mark.usefixtures("program_server")
def test_a_stranger_in_the_place_of_a_rank_is_found_before_anything_is_summed(tmp_path: Path) -> None:
    """In a process of its own: gloo may close files of others after a connection has failed."""
    script = tmp_path / "stranger.py"
    script.write_text("from tests.comm.test_peers import meet_a_stranger\nmeet_a_stranger()\n")
    env = {**os.environ, "PYTHONPATH": str(programs.ROOT)}
    done = subprocess.run([*programs.PYTHON, str(script)], env=env, capture_output=True, text=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first.startswith("RunError ranks could not prove the secret to each other within 1 s")
    assert second.startswith("RunError ")
