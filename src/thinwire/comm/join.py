"""How a process becomes a rank: find the other ranks, make the process groups, close them in order."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm.addresses import AUTO, gloo_interface
from thinwire.comm.ledger import Ledger
from thinwire.comm.patience import DEFAULT_SECONDS, patience_seconds
from thinwire.comm.peers import agree_on_secret, check_peers, joined_with
from thinwire.comm.process import ProcessComm
from thinwire.comm.process_groups import meeting, new_group, timeout_of
from thinwire.comm.secret import Secret, read_secret
from thinwire.comm.store import rendezvous
from thinwire.comm.watch import start_watch
from thinwire.comm.world import World, find_world, node_key, number_nodes
from thinwire.common.memory import keep_freed_memory
from thinwire.errors import PeerLost, RunError, UsageError

WORLD_OF_ONE = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=0, launcher="none")


@contextmanager
def join(
    backend: str | None = None,
    patience: float | str | None = None,
    device: torch.device | str | None = None,
    iface: str = AUTO,
    secret_file: Path | None = None,
) -> Iterator[ProcessComm]:
    """Join the world that torchrun, srun, mpirun or `thinwire train` made. Without one, be a world of one rank.

    Ranks wait for each other for as long as `patience`, seconds or a duration as "5m"; by default 5 minutes until all
    are here, and then 30 minutes. Ranks connect through the interface `iface` of their machine, as eth0; by default
    through the one that leads to rank 0. With a secret, in a file or in the variable THINWIRE_SECRET, all ranks must
    know it. A default process group that exists already is used as it is, with its own interface and timeout, and not
    destroyed; with a secret, its connections are tried.

    >>> import thinwire, torch
    >>> with thinwire.join() as comm:
    ...     comm.size, comm.mean(torch.ones(2)).tolist()
    (1, [1.0, 1.0])
    """
    seconds = None if patience is None else patience_seconds(patience)
    keep_freed_memory()
    world = find_world() or WORLD_OF_ONE
    chosen = pick_device(world) if device is None else torch.device(device)
    secret = read_secret(secret_file)
    if dist.is_initialized():
        agree_on_secret(keys := _keys_in_store_of(default_group()), dist.get_rank(), dist.get_world_size(), secret)
        with _world_comm(chosen, keys, secret) as comm:
            yield comm
        return
    with gloo_interface(world.address, iface):
        store = rendezvous(world, iface, seconds, secret)
        backend = backend or agree_on_backend(store, world, pick_backend(world, chosen))
        _init_process_group(world, store, backend, seconds or DEFAULT_SECONDS)
        try:
            with _world_comm(chosen, dist.PrefixStore("watch", store), secret) as comm:
                yield comm
        finally:
            dist.destroy_process_group()
            wait_for_gloo_threads()


def wait_for_gloo_threads() -> None:
    """Wait until gloo's threads are idle, for at most a second.

    A gloo thread marks an operation as done before it frees the tensors. If the interpreter ends in between, the
    thread aborts the process. Threads end with their group, but DDP never frees its group.
    """
    num_idle = 0
    for _ in range(1000):
        time.sleep(0.001)
        states = [_thread_state(task) for task in Path("/proc/self/task").glob("*/stat")]
        num_idle = 0 if "pt_gloo_runloop R" in states else num_idle + 1
        if num_idle == 3:
            return


def _thread_state(stat: Path) -> str:
    """The name of a thread, and the letter of its state: R for running."""
    try:
        _, name, rest = re.split(r"[()]", stat.read_text(), maxsplit=2)
    except (OSError, ValueError):
        return ""  # the thread has just ended
    return f"{name} {rest.split()[0]}"


def _keys_in_store_of(group: dist.ProcessGroup) -> dist.Store:
    """Keys in the store of a group that exists, for one join of all its ranks."""
    store = group.get_group_store()
    return dist.PrefixStore(f"thinwire/watch/{store.add(f'thinwire/watches/{group.rank()}', 1)}", store)


@contextmanager
def _world_comm(device: torch.device, store: dist.Store, secret: Secret | None) -> Iterator[ProcessComm]:
    """A Comm over the default group, whose ranks must all know the secret if there is one."""
    group = dist.group.WORLD
    assert group is not None
    check_peers((group,), secret)
    nodes = number_nodes([tuple(key) for key in gather_numbers(own_node_key(), group, device)])
    with meeting():  # who is gone was missed above, at once; from here on all ranks are waited for
        side_group = new_group(timeout=timeout_of(group), backend=dist.get_backend())
    check_peers((side_group,), secret)
    watch = start_watch(store, group.rank(), range(group.size()), timeout_of(group))
    comm = ProcessComm((group, side_group), range(group.size()), "world", Ledger(), device, nodes, secret, watch)
    del group, side_group  # gloo's threads end once nothing refers to their group
    with joined_with(secret), closing(comm):
        yield comm


def is_single_process() -> bool:
    """Whether this process is a world of its own: it has no peers, and no launcher says that it should have some."""
    if dist.is_initialized():
        return dist.get_world_size() == 1
    world = find_world()
    return world is None or world.size == 1


def default_group() -> dist.ProcessGroup:
    """torch's default process group; UsageError if the processes of this world have none yet."""
    if not dist.is_initialized():
        world = find_world() or WORLD_OF_ONE
        raise UsageError(
            f"this is one of {world.size} processes that {world.launcher} started, but they have no process group yet; "
            "call torch.distributed.init_process_group before, or use: with tw.join() as comm"
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def own_node_key() -> tuple[int, int]:
    """What this rank shares with the others of its node: of one host, if one torchrun started them."""
    return node_key(find_world() or WORLD_OF_ONE)


def gather_numbers(own: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Equally many whole numbers of every rank of a process group, in its order. Collective."""
    sent = torch.tensor(own, device=device if dist.get_backend(group) == "nccl" else "cpu")
    gathered = [torch.empty_like(sent) for _ in range(group.size())]
    with meeting():
        dist.all_gather(gathered, sent, group)
    return [one.tolist() for one in gathered]


def pick_device(world: World | None = None) -> torch.device:
    """This rank's GPU if there are GPUs (ranks share them if there are more ranks), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", (world or WORLD_OF_ONE).local_rank % torch.cuda.device_count())


def pick_backend(world: World, device: torch.device) -> str:
    """nccl if each rank has a GPU of its own, else gloo."""
    own_gpu = device.type == "cuda" and world.local_size <= torch.cuda.device_count()
    return "nccl" if own_gpu and dist.is_nccl_available() and world.size > 1 else "gloo"


def agree_on_backend(store: dist.Store, world: World, own: str) -> str:
    """nccl if every rank can use it, else gloo: machines may have different numbers of GPUs. Collective."""
    store.set(f"backend/{world.rank}", own)
    found = store.multi_get([f"backend/{rank}" for rank in range(world.size)])
    return "nccl" if set(found) == {b"nccl"} else "gloo"


def _init_process_group(world: World, store: dist.Store, backend: str, patience: float) -> None:
    timeout = datetime.timedelta(seconds=patience)
    try:
        with meeting():
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    except PeerLost as error:
        raise PeerLost(
            f"rank {world.rank} could not join {world.size} ranks: {error}; if none has ended, a firewall may be "
            "between two: thinwire doctor tries every link"
        ) from error
    except dist.DistError as error:
        raise RunError(f"rank {world.rank} could not join {world.size} ranks: {error}") from error
