"""Models that are dropped without closing what was attached to them, as in a search for settings: nothing piles up."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.training import PLAIN
from tests.worlds import ProcessWorlds, ends_of, mesh_of
from thinwire.comm.base import Comm
from thinwire.comm.join import default_group

TRIALS = 4


def trial(kind: str) -> weakref.ref[Any]:
    """Train a model for two steps, and forget it; returns what tells whether it is still there."""
    model: Any = copy.deepcopy(PLAIN)
    if kind == "fsdp":
        fully_shard(model, mesh=mesh_of((2, 2), ("nodes", "shards"))["shards"])
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    in_rounds = kind in ("rounds", "streaming")
    spec = {"rounds": "local_sgd(every=1)", "streaming": "diloco(every=2, wait=1)"}.get(kind, "maxnorm(bits=4)")
    exchange: Any = (tw.rounds if in_rounds else tw.attach)(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        if in_rounds:
            exchange.after_step()
    return weakref.ref(exchange)


def threads_after_trials(comm: Comm, kind: str) -> tuple[list[bool], list[int]]:
    """Of each trial: whether what was attached is gone, and the number of threads that this process has then."""
    gone, threads = [], []
    for _ in range(TRIALS):
        attached, end = trial(kind), time.monotonic() + 10
        while attached() is not None and time.monotonic() < end:  # a communication thread may still leave a function
            gc.collect()
            time.sleep(0.01)
        gone.append(attached() is None)
        threads.append(len(list(Path("/proc/self/task").iterdir())))
    return gone, threads


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "rounds", "streaming"])
def test_what_is_dropped_is_closed_when_the_next_one_is_made(process_world: ProcessWorlds, kind: str) -> None:
    for gone, threads in process_world.run(threads_after_trials, 4, kind):
        assert all(gone)
        assert threads[-1] == threads[0]


def two_worlds(comm: Comm) -> None:
    """Rounds are dropped in a world, and its process group is destroyed and made again, as a notebook does.

    torch has then forgotten the groups of the first world, which `comm` closes at its end.
    """
    comm.split([range(comm.size)], "world")
    store = default_group().get_group_store()
    for number in range(2):
        dist.destroy_process_group()
        keys = dist.PrefixStore(f"again/{number}", store)
        dist.init_process_group("gloo", store=keys, rank=comm.rank, world_size=comm.size)
        model = copy.deepcopy(PLAIN)
        rounds: Any = tw.rounds(model, "daso(warmup_epochs=1, cooldown_epochs=1)", epochs=9)
        rounds.together()
        del rounds, model
        gc.collect()


@pytest.mark.usefixtures("process_world")  # whose fork server stays
def test_what_is_dropped_in_a_world_does_not_disturb_the_next_one() -> None:
    assert ends_of(two_worlds, [2, 2]) == [""] * 4
