"""How a process becomes a rank: find the others, make the groups, leave in order."""

from __future__ import annotations

import atexit
import datetime
import fcntl
import functools
import itertools
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm.ledger import Ledger
from thinwire.comm.process import ProcessComm, new_pair, timeout_of
from thinwire.comm.world import World, find_world, host_id
from thinwire.errors import RunError, UsageError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
JOIN_SECONDS = 300
LONGEST_SECONDS = 31_536_000  # a year
WAIT_QUIETLY_SECONDS = 10
LOOPBACK = ("127.0.0.1", "localhost")
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=0, launcher="none")
_joins = itertools.count()


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
    with _gloo_interface(world):
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


@contextmanager
def _gloo_interface(world: World) -> Iterator[None]:
    """Have gloo use the interface that leads to rank 0.

    Left to itself it looks up the host's own name, which many systems answer with an address that no other host
    can reach.
    """
    name = None if "GLOO_SOCKET_IFNAME" in os.environ else _interface_towards(world.address)
    if name is None:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _interface_towards(address: str) -> str | None:
    """The name of the interface whose IPv4 address this host would use to talk to another, if that can be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it only asks for the route
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None


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
    store: dist.Store = dist.HashStore() if world.size == 1 else _store(world)
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    except dist.DistError as error:
        raise RunError(f"rank {world.rank} could not join {world.size} ranks: {error}") from error


def _store(world: World) -> dist.Store:
    """Where the ranks meet, once all of them are there; each join of a process has a part of its own."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    where = f"{world.address}:{world.port}"
    patience = threading.Timer(WAIT_QUIETLY_SECONDS, _say_waiting, (world, where))
    patience.daemon = True
    patience.start()
    try:
        store = dist.PrefixStore(f"thinwire/{attempt}/{next(_joins)}", _open_store(world))
        store.set(f"here/{world.rank}", "")
        store.wait([f"here/{rank}" for rank in range(world.size)], datetime.timedelta(seconds=JOIN_SECONDS))
        return store
    except (dist.DistError, OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UsageError(f"{where} is in use by another program; set MASTER_PORT to a free port") from None
        raise RunError(
            f"rank {world.rank} did not meet all {world.size} ranks at {where} within {JOIN_SECONDS} s; "
            f"start them all, and check MASTER_ADDR, MASTER_PORT and the firewall ({str(error).splitlines()[0]})"
        ) from error
    finally:
        patience.cancel()


@functools.cache
def _open_store(world: World) -> dist.Store:
    """The launcher's store if it has one, else one that rank 0 opens; kept for the life of the process."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = world.rank == 0 and not hosted
    timeout = datetime.timedelta(seconds=JOIN_SECONDS)
    if master and world.address in LOOPBACK:
        return loopback_store(world.size, world.port, timeout)
    return dist.TCPStore(world.address, world.port, world.size, master, timeout, wait_for_workers=False)


def _say_waiting(world: World, where: str) -> None:
    print(f"rank {world.rank} is waiting at {where} for all {world.size} ranks", file=sys.stderr, flush=True)


def loopback_store(num_ranks: int, port: int = 0, timeout: datetime.timedelta | None = None) -> dist.TCPStore:
    """A store that listens on 127.0.0.1 alone (torch's own listens on every interface)."""
    listener = socket.create_server(("127.0.0.1", port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, num_ranks, True, timeout or datetime.timedelta(seconds=300),
        wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip
