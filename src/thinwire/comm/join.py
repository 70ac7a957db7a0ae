"""How a process becomes a rank: find the others, make the groups, leave in order."""

from __future__ import annotations

import atexit
import datetime
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm.ledger import Ledger
from thinwire.comm.process import ProcessComm, new_pair, timeout_of
from thinwire.comm.store import gloo_interface, meet
from thinwire.comm.world import World, find_world, host_id
from thinwire.errors import RunError, UsageError

LONGEST_SECONDS = 31_536_000  # a year
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=0, launcher="none")


@contextmanager
def join(
    backend: str | None = None, timeout_seconds: float = 1800, device: torch.device | str | None = None
) -> Iterator[ProcessComm]:
    """Join the world that torchrun, srun, mpirun or `thinwire train` made; alone, be a world of one.

    Whoever waits longer than `timeout_seconds` for another rank takes it for lost. A process group that exists already
    is used as it is, with its own timeout, and left standing.

    >>> import thinwire, torch
    >>> with thinwire.join() as comm:
    ...     comm.size, comm.mean(torch.ones(2)).tolist()
    (1, [1.0, 1.0])
    """
    if not 0 < timeout_seconds <= LONGEST_SECONDS:
        raise UsageError(f"join: timeout_seconds={timeout_seconds}; possible: more than 0, up to {LONGEST_SECONDS}")
    world = find_world() or ALONE
    chosen = pick_device(world) if device is None else torch.device(device)
    if dist.is_initialized():
        with closing(_world_comm(chosen)) as comm:
            yield comm
        return
    with gloo_interface(world):
        _init(world, backend or _pick_backend(world, chosen), timeout_seconds)
        try:
            with closing(_world_comm(chosen)) as comm:
                yield comm
        finally:
            dist.destroy_process_group()
            _let_gloo_rest()


def _let_gloo_rest() -> None:
    """Wait a moment until gloo's threads have nothing in hand.

    A thread hands over a result before it lets go of the tensors; if the interpreter ends in between, it aborts the
    process. Threads end with their group, but DDP keeps a group for ever.
    """
    quiet = 0
    for _ in range(1000):
        time.sleep(0.001)
        states = [_state(task) for task in Path("/proc/self/task").glob("*/stat")]
        quiet = 0 if "pt_gloo_runloop R" in states else quiet + 1
        if quiet == 3:
            return


def _state(stat: Path) -> str:
    """The name of a thread, and the letter for what it does: R for running."""
    try:
        _, name, rest = re.split(r"[()]", stat.read_text(), maxsplit=2)
    except (OSError, ValueError):
        return ""  # it has just ended
    return f"{name} {rest.split()[0]}"


def _world_comm(device: torch.device) -> ProcessComm:
    group = dist.group.WORLD
    assert group is not None
    groups = (group, dist.new_group(timeout=timeout_of(group), backend=dist.get_backend()))
    return ProcessComm(groups, "world", Ledger(), device, _nodes(device))


def beside(group: dist.ProcessGroup, device: torch.device) -> ProcessComm:
    """A comm of its own for all ranks, beside a group that somebody else is using, as patient as it is. Collective."""
    if group.size() != dist.get_world_size():
        raise UsageError(f"a process group of {group.size()} of {dist.get_world_size()} ranks; possible: all ranks")
    on_gpu = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
    backend = "nccl" if on_gpu else "gloo"
    comm = ProcessComm(new_pair(None, backend, timeout_of(group)), "world", Ledger(), device, _nodes(device))
    atexit.register(comm.close)
    return comm


def _nodes(device: torch.device) -> list[int]:
    """The node of each rank, numbered in rank order: ranks on one host, if one torchrun started them, are on one."""
    world = find_world() or ALONE
    several = world.launcher == "torchrun" and world.local_size < world.size  # which numbers ranks node by node
    first = world.rank - world.local_rank if several else 0
    own = torch.tensor([host_id(), first], device=device if dist.get_backend() == "nccl" else "cpu")
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    found = [tuple(one.tolist()) for one in gathered]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(found))}
    return [numbers[node] for node in found]


def pick_device(world: World | None = None) -> torch.device:
    """This rank's GPU where there is one (ranks share GPUs when there are more ranks), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", (world or ALONE).local_rank % torch.cuda.device_count())


def _pick_backend(world: World, device: torch.device) -> str:
    own_gpu = device.type == "cuda" and world.local_size <= torch.cuda.device_count()
    return "nccl" if own_gpu and dist.is_nccl_available() and world.size > 1 else "gloo"


def _init(world: World, backend: str, timeout_seconds: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store: dist.Store = dist.HashStore() if world.size == 1 else meet(world)
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    except dist.DistError as error:
        raise RunError(f"rank {world.rank} could not join {world.size} ranks: {error}") from error
