"""Where ranks meet: a store at one address of rank 0's machine, and the interface that leads there."""

from __future__ import annotations

import datetime
import errno
import fcntl
import functools
import ipaddress
import itertools
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from thinwire.comm.world import World
from thinwire.errors import RunError, UsageError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
JOIN_SECONDS = 300
RESOLVE_SECONDS = 60  # a name that nobody knows by then is a mistake; those of containers take a while
WAIT_QUIETLY_SECONDS = 10
_joins = itertools.count()


def meet(world: World) -> dist.Store:
    """A store that all ranks share, once all of them are there; each join of a process has a part of its own."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    where = f"{world.address}:{world.port}"
    addresses = _resolved(world)
    patience = threading.Timer(WAIT_QUIETLY_SECONDS, _say_waiting, (world, where, addresses))
    patience.daemon = True
    patience.start()
    try:
        store = dist.PrefixStore(f"thinwire/{attempt}/{next(_joins)}", _open_store(world))
        store.set(f"here/{world.rank}", "")
        store.wait([f"here/{rank}" for rank in range(world.size)], datetime.timedelta(seconds=JOIN_SECONDS))
        return store
    except (dist.DistError, OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UsageError(f"{where} is in use; set MASTER_PORT to a free port, or start rank 0 once only") from None
        raise RunError(
            f"rank {world.rank} did not meet all {world.size} ranks at {where} within {JOIN_SECONDS} s; start them "
            f"all, {_what_to_set(world)}, and check MASTER_PORT and the firewall ({str(error).splitlines()[0]})"
        ) from error
    finally:
        patience.cancel()


@functools.cache
def _open_store(world: World) -> dist.Store:
    """The launcher's store if it has one, else one that rank 0 opens; kept for the life of the process."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = datetime.timedelta(seconds=JOIN_SECONDS)
    if world.rank or hosted:
        return dist.TCPStore(world.address, world.port, world.size, False, timeout, wait_for_workers=False)
    addresses = _resolved(world)
    if world.address not in (*addresses, "localhost") and _reaches_this_machine_alone(world, addresses):
        raise UsageError(
            f"{_spelled(world.address, addresses)} is this machine alone, and other ranks are on other machines; "
            f"{_what_to_set(world)}; this one has {', '.join(own_addresses())}"
        )
    for address in addresses:
        try:
            return _store_at(address, world.port, world.size, timeout)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    raise UsageError(
        f"rank 0 listens at MASTER_ADDR, but {_spelled(world.address, addresses)} is no address of this machine "
        f"({socket.gethostname()}), which has {', '.join(own_addresses())}; {_what_to_set(world)}"
    )


def loopback_store(num_ranks: int) -> dist.TCPStore:
    """A store for the ranks of this machine, at a free port."""
    return _store_at("127.0.0.1", 0, num_ranks, datetime.timedelta(seconds=JOIN_SECONDS))


def _store_at(address: str, port: int, num_ranks: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """A store that listens at one address alone (torch's own listens on every interface)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, num_ranks, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@functools.cache
def _resolved(world: World) -> tuple[str, ...]:
    """The addresses that MASTER_ADDR stands for, IPv4 first. torch would warn of an unknown name once a second."""
    deadline: float | None = None
    while True:
        try:
            return addresses_of(world.address)
        except OSError as error:
            why = f"rank {world.rank} cannot find rank 0's machine: nobody knows the name {world.address} ({error})"
        if deadline is None:
            deadline = time.monotonic() + RESOLVE_SECONDS
            print(f"{why}; trying again for {RESOLVE_SECONDS} s", file=sys.stderr, flush=True)
        elif time.monotonic() > deadline:
            raise RunError(f"{why}; {_what_to_set(world)}")
        time.sleep(min(1.0, RESOLVE_SECONDS))


def addresses_of(host: str) -> tuple[str, ...]:
    """A name's addresses, IPv4 first; an address is its own.

    >>> addresses_of("127.0.0.1"), addresses_of("::1")
    (('127.0.0.1',), ('::1',))
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # how Python says that no name can be spelled like that
        raise OSError(str(error)) from error
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))


def _what_to_set(world: World) -> str:
    """What a user can type so that the ranks find each other."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "give torchrun on each machine --local-addr and an address of that machine which the others can reach"
    return "set MASTER_ADDR on every rank to an address of rank 0's machine which the others can reach"


def _say_waiting(world: World, where: str, addresses: tuple[str, ...]) -> None:
    hint = ""
    if _reaches_this_machine_alone(world, addresses):
        hint = (
            f"; {_spelled(world.address, addresses)} reaches this machine alone: if others are on another one, "
            f"{_what_to_set(world)}"
        )
    print(f"rank {world.rank} is waiting at {where} for all {world.size} ranks{hint}", file=sys.stderr, flush=True)


def _reaches_this_machine_alone(world: World, addresses: tuple[str, ...]) -> bool:
    """Whether there are ranks on other machines, and addresses that only this one can reach."""
    loopback = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    return loopback and world.local_size < world.size


def _spelled(host: str, addresses: tuple[str, ...]) -> str:
    return host if addresses == (host,) else f"{host} ({', '.join(addresses)})"


# ---- interfaces


@contextmanager
def gloo_interface(world: World) -> Iterator[None]:
    """Have gloo use the interface that leads to rank 0, and listen there alone.

    Left to itself it looks up the host's own name, which many systems answer with an address that no other host
    can reach.
    """
    name = None if "GLOO_SOCKET_IFNAME" in os.environ else interface_towards(world.address)
    if name is None:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def interface_towards(host: str) -> str | None:
    """The name of the interface over which this machine would talk to another, if that can be told."""
    with suppress(OSError):  # nobody knows the name, or there is no way there
        for address in addresses_of(host):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: it only asks for the route
                return own_addresses().get(probe.getsockname()[0])
    return None


def own_addresses() -> dict[str, str]:
    """This machine's addresses, and the interface of each: the first IPv4 address of every one, and all IPv6 ones."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return found
