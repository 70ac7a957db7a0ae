"""What one rank knows of its machine, without asking others."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire import __version__, netlab
from thinwire.comm.addresses import gloo_address, own_addresses, resolve_host
from thinwire.comm.join import pick_backend
from thinwire.comm.world import World, node_key
from thinwire.common.memory import free_memory
from thinwire.config import RunConfig
from thinwire.run.network import LinkReport

MAKE_HOSTS_SECONDS = 20.0
LISTENING = "0A"  # the state of a socket in /proc/net/tcp


@dataclass(frozen=True)
class Facts:
    """One rank's machine. All values are JSON."""

    host: str
    node: str  # equal on ranks of one node
    local_ranks: int  # that the launcher started on this machine
    versions: dict[str, str]
    backend: str
    device: str
    cpu: str
    cores: int  # that this process may use
    threads: int  # of torch, for one rank
    interface: str | None  # to rank 0's machine
    address: str | None  # of that interface
    addresses: dict[str, str]  # of this machine → their interfaces
    name_addresses: list[str]  # what this machine's own name resolves to
    store_listens_at: list[str]  # addresses; empty where another machine has the store
    open_files: int  # the most that this process may have
    memory_bytes: int  # that is free
    folder: str  # for results
    folder_bytes: int  # that are free
    folder_is_writable: bool
    hosts_error: str | None  # why netlab can make no hosts; "" if it can, None if it was not tried


def look(config: RunConfig, world: World, device: torch.device, link: LinkReport) -> Facts:
    """Examine the machine of this process. The first rank of each node really makes two hosts, to see if it may."""
    interface, address = gloo_address(world.address)
    folder = _existing(config.out or Path("runs"))
    is_first = world.local_rank == 0 and not link.on_hosts
    return Facts(
        host=socket.gethostname(),
        node="/".join(map(str, node_key(world))),
        local_ranks=world.local_size,
        versions={"python": platform.python_version(), "torch": torch.__version__, "thinwire": __version__},
        backend="gloo" if link.on_hosts else pick_backend(world, device),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        cpu=_cpu_model(),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        interface=interface,
        address=address,
        addresses=own_addresses(),
        name_addresses=_resolved(socket.gethostname()),
        store_listens_at=listening_addresses(world.port) if world.rank == 0 else [],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory_bytes=int(min(free_memory(), 2**62)),
        folder=str(folder),
        folder_bytes=shutil.disk_usage(folder).free,
        folder_is_writable=os.access(folder, os.W_OK | os.X_OK),
        hosts_error=_why_no_hosts() if is_first else None,
    )


def num_cores() -> int:
    """Cores that this process may use, by its affinity and by the limit of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such limit
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, round(quota / period)))
    return cores


def listening_addresses(port: int) -> list[str]:
    """The addresses of this machine at which a TCP port is open, as the Linux kernel lists them.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     listening_addresses(server.getsockname()[1])
    ['127.0.0.1']
    """
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # a Linux kernel without IPv6
            for line in Path("/proc/thread-self/net", name).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                digits, _, number = local.partition(":")
                if state == LISTENING and int(number, 16) == port:
                    found.append(_decoded(digits))
    return found


def _decoded(digits: str) -> str:
    """An address as /proc/net/tcp has it: words of 32 bits, each with its last byte first."""
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def _resolved(name: str) -> list[str]:
    try:
        return list(resolve_host(name))
    except OSError:
        return []


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _cpu_model() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found.group(1).strip() if found else platform.machine()


def _why_no_hosts() -> str:
    try:
        with netlab.hosts(2, start_seconds=MAKE_HOSTS_SECONDS):
            return ""
    except netlab.NotAllowed as error:
        return str(error)
