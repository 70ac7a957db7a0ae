"""The store through which ranks find each other. It listens at one address of rank 0's machine."""

from __future__ import annotations

import datetime
import errno
import functools
import ipaddress
import itertools
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from thinwire.comm.addresses import AUTO, addresses_of, interface_to, own_addresses, resolve_host
from thinwire.comm.open_store import OpenStore, open_store, reach_store
from thinwire.comm.secret import Secret
from thinwire.comm.world import World
from thinwire.common.durations import format_duration
from thinwire.common.messages import print_line
from thinwire.errors import RunError, UsageError

JOIN_SECONDS = 300.0  # unless a patience is given: who is not here by then has mostly not been started
RESOLVE_SECONDS = 60  # names of containers may be unknown for a while; one that is unknown for longer is a mistake
WAIT_QUIETLY_SECONDS = 10  # before a rank prints that it waits for others
JOIN_VARIABLE = "THINWIRE_JOIN"  # set for processes that join in place of others: a name for the keys of this join
RUN_ID = "thinwire"  # of the ranks that thinwire starts itself
_joins = itertools.count()
_stores: dict[World, OpenStore] = {}  # kept for the life of the process


def rendezvous(
    world: World, iface: str = AUTO, patience: float | None = None, secret: Secret | None = None
) -> dist.Store:
    """Wait until all ranks are here, for at most so many seconds; returns the store that they share.

    Each join of a process has keys of its own.

    If rank 0 opens the store, it listens at MASTER_ADDR, which must be an address of the interface `iface`. With a
    secret, who does not know it does not reach the store.
    """
    if world.size == 1:
        return dist.HashStore()
    world = _placed(world, iface, secret)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    within = os.environ.get(JOIN_VARIABLE, "world")
    where, seconds = f"{world.address}:{world.port}", patience or JOIN_SECONDS
    addresses = _resolve_master(world)
    notice = threading.Timer(WAIT_QUIETLY_SECONDS, _print_waiting, (world, where, addresses))
    notice.daemon = True
    notice.start()
    store: dist.Store | None = None
    try:
        opened = _store_of(world, iface, seconds, secret)
        store = dist.PrefixStore(f"thinwire/{attempt}/{within}/{next(_joins)}", opened.store)
        store.set(f"here/{world.rank}", "")
        store.wait([f"here/{rank}" for rank in range(world.size)], datetime.timedelta(seconds=seconds))
        return store
    except (dist.DistError, OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UsageError(f"{where} is in use; set MASTER_PORT to a free port, or start rank 0 once only") from None
        raise RunError(
            f"rank {world.rank} did not meet all {world.size} ranks at {where} within {format_duration(seconds)}"
            f"{_missing(store, world)}; start them all, {_what_to_set()}, and check MASTER_PORT and the firewall; if "
            f"they need longer, give --patience ({str(error).splitlines()[0]})"
        ) from error
    finally:
        notice.cancel()


def _missing(store: dist.Store | None, world: World) -> str:
    """The ranks that did not come, if the store can tell."""
    with suppress(RuntimeError):
        missing = [rank for rank in range(world.size) if store and not store.check([f"here/{rank}"])]
        return f": {', '.join(f'rank {rank}' for rank in missing)} did not come" if missing else ""
    return ""


def met_at(world: World, iface: str = AUTO, secret: Secret | None = None) -> tuple[str, int]:
    """The address and the port of the store at which this process has met the others."""
    opened = _stores[_placed(world, iface, secret)]
    return opened.address, opened.port


def _placed(world: World, iface: str, secret: Secret | None) -> World:
    """The world with the address and the port of its store."""
    if secret is not None and _has_torchruns_store():
        world = replace(world, port=world.port + 1)  # torchrun's own store asks nobody for a secret
    if iface != AUTO and world.local_size == world.size and not os.environ.get("MASTER_ADDR"):
        return replace(world, address=addresses_of(iface)[0])  # all ranks are on this machine
    return world


def _store_of(world: World, iface: str, seconds: float, secret: Secret | None) -> OpenStore:
    """The store that this process uses for a world; a later join uses it again, also one with another interface."""
    if world not in _stores:
        _stores[world] = _open_store(world, iface, seconds, secret)
    return _stores[world]


def _open_store(world: World, iface: str, seconds: float = JOIN_SECONDS, secret: Secret | None = None) -> OpenStore:
    """The launcher's store if it has one, else one that rank 0 opens."""
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world.rank or (is_hosted and not (secret and _has_torchruns_store())):
        return reach_store(world.size, world.address, world.port, seconds, secret)
    addresses = _on_interface(world, iface) if iface != AUTO else _resolve_master(world)
    if world.address not in (*addresses, "localhost") and _is_unreachable_for_others(world, addresses):
        raise UsageError(
            f"{_spelled(world.address, addresses)} is this machine alone, and other ranks are on other machines; "
            f"{_what_to_set()}; this one has {', '.join(own_addresses())}"
        )
    if any(ipaddress.ip_address(address.partition("%")[0]).is_unspecified for address in addresses):
        raise UsageError(
            f"MASTER_ADDR={world.address} is every interface of a machine, and thinwire listens at one address only; "
            f"{_what_to_set()}; this one has {', '.join(own_addresses())}"
        )
    for address in addresses:
        try:
            return open_store(world.size, address, world.port, seconds, secret)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    raise UsageError(
        f"rank 0 listens at MASTER_ADDR, but {_spelled(world.address, addresses)} is no address of this machine "
        f"({socket.gethostname()}), which has {', '.join(own_addresses())}; {_what_to_set()}"
    )


def _has_torchruns_store() -> bool:
    """Whether torchrun itself has opened a store, and not a process of thinwire."""
    of_thinwire = JOIN_VARIABLE in os.environ or os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not of_thinwire


def _on_interface(world: World, iface: str) -> tuple[str, ...]:
    """Those addresses of MASTER_ADDR that rank 0's machine has on an interface; UsageError if there are none.

    If this machine takes its own name for a loopback address (as 127.0.1.1 on Debian), the interface's own address is
    what the name stands for on other machines.
    """
    addresses = _resolve_master(world)
    own = addresses_of(iface)
    if found := tuple(address for address in addresses if interface_to(address) == iface):
        return found
    if world.address not in addresses and _is_unreachable_for_others(world, addresses):
        return (own[0],)
    raise UsageError(
        f"--iface {iface} has {', '.join(own)}, but rank 0 listens at MASTER_ADDR, which is "
        f"{_spelled(world.address, addresses)}; set MASTER_ADDR={own[0]} on every rank, or name another interface"
    )


def local_store(num_ranks: int) -> dist.TCPStore:
    """A store for ranks of this machine, at a free port."""
    return open_store(num_ranks).store


@functools.cache
def _resolve_master(world: World) -> tuple[str, ...]:
    """The addresses of MASTER_ADDR, IPv4 first. Waits for a name to become known; torch would warn once a second."""
    deadline: float | None = None
    while True:
        try:
            return resolve_host(world.address)
        except OSError as error:
            why = f"rank {world.rank} cannot find rank 0's machine: nobody knows the name {world.address} ({error})"
        if deadline is None:
            deadline = time.monotonic() + RESOLVE_SECONDS
            print_line(f"{why}; trying again for {RESOLVE_SECONDS} s")
        elif time.monotonic() > deadline:
            raise RunError(f"{why}; {_what_to_set()}")
        time.sleep(min(1.0, RESOLVE_SECONDS))


def _what_to_set() -> str:
    """What a user can type so that the ranks find each other."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "give torchrun on each machine --local-addr and an address of that machine which the others can reach"
    return "set MASTER_ADDR on every rank to an address of rank 0's machine which the others can reach"


def _print_waiting(world: World, where: str, addresses: tuple[str, ...]) -> None:
    hint = ""
    if _is_unreachable_for_others(world, addresses):
        hint = (
            f"; {_spelled(world.address, addresses)} reaches this machine alone: if others are on another one, "
            f"{_what_to_set()}"
        )
    print_line(f"rank {world.rank} is waiting at {where} for all {world.size} ranks{hint}")


def _is_unreachable_for_others(world: World, addresses: tuple[str, ...]) -> bool:
    """Whether there are ranks on other machines, and all addresses are loopback ones of this machine."""
    is_loopback = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    return is_loopback and world.local_size < world.size


def _spelled(host: str, addresses: tuple[str, ...]) -> str:
    """A host name with its addresses."""
    return host if addresses == (host,) else f"{host} ({', '.join(addresses)})"
