"""Whether ranks can open connections to each other, tried before there are process groups.

gloo connects every rank with every other one when ranks join, and waits for minutes if a firewall drops a connection.
Here each attempt is bounded, and the ranks tell each other through the store.
"""

from __future__ import annotations

import datetime
import errno
import json
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

MOST_PEERS = 64  # that one rank tries to reach
LEAVE_SECONDS = 10.0
CONNECT_SECONDS = 4.0  # a packet that was lost is sent again after 1 and 3 s


class Store(Protocol):
    """What is used of torch's store; `get` waits until there is a value."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> Any: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> Any: ...


class Unreached(NamedTuple):
    """A connection that could not be opened, and why."""

    source: int
    to: int
    address: str
    port: int
    reason: str


def gather_through(store: Store, name: str, rank: int, size: int, value: Any) -> list[Any]:
    """Every rank's JSON value, on every rank, by a store. The name must be new to the store.

    >>> import torch.distributed as dist
    >>> gather_through(dist.HashStore(), "facts", rank=0, size=1, value={"cores": 2})
    [{'cores': 2}]
    """
    store.set(f"{name}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{name}/{one}")) for one in range(size)]


def leave_store(store: Store, rank: int, size: int) -> None:
    """Stop using the store. Rank 0, which may hold it, waits a while for the others."""
    with suppress(RuntimeError):  # rank 0 has gone already
        store.add(f"left/{rank}", 1)  # it has an answer, unlike set: what this rank has set is there, too
    if rank == 0:
        with suppress(RuntimeError):  # another rank has ended
            store.wait([f"left/{one}" for one in range(size)], datetime.timedelta(seconds=LEAVE_SECONDS))


def find_unreached(
    store: Store, rank: int, size: int, address: str, among: Sequence[int], seconds: float = CONNECT_SECONDS
) -> list[Unreached]:
    """Pairs of ranks that cannot open a connection. Each of the ranks `among` listens at its address, and tries others.

    Each tries the next `MOST_PEERS` at most. Collective; every rank gets the same.

    >>> import torch.distributed as dist
    >>> find_unreached(dist.HashStore(), rank=0, size=1, address="127.0.0.1", among=[0])
    []
    """
    listener, where = _listen(address, backlog=len(among)) if rank in among else (None, None)
    try:
        listening = gather_through(store, "reach/listening", rank, size, where)
        own = []
        if rank in among:
            at = among.index(rank)
            peers = [*among[at + 1 :], *among[:at]][:MOST_PEERS]
            addresses = {peer: (str(listening[peer][0]), int(listening[peer][1])) for peer in peers}
            reasons = try_connections(addresses, seconds)
            own = [Unreached(rank, peer, *addresses[peer], reason) for peer, reason in reasons.items()]
        found = gather_through(store, "reach/unreached", rank, size, own)  # nobody closes before all have tried
    finally:
        if listener is not None:
            listener.close()
    return [Unreached(*one) for part in found for one in part]


def try_connections(listening: Mapping[int, tuple[str, int]], seconds: float = CONNECT_SECONDS) -> dict[int, str]:
    """Open a connection to each address at the same time. Those that fail → why.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     try_connections({1: server.getsockname()}, seconds=1)
    {}
    """
    reasons: dict[int, str] = {}
    with selectors.DefaultSelector() as waiting:
        for peer, (address, port) in listening.items():
            one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            one.setblocking(False)
            code = one.connect_ex((address, port))
            if code in (0, errno.EINPROGRESS):
                waiting.register(one, selectors.EVENT_WRITE, peer)
            else:
                reasons[peer] = _reason(code)
                one.close()
        end = time.monotonic() + seconds
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                assert isinstance(key.fileobj, socket.socket)
                if code := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    reasons[key.data] = _reason(code)
                waiting.unregister(key.fileobj)
                key.fileobj.close()
        for key in list(waiting.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            reasons[key.data] = f"no answer within {seconds:g} s"
            key.fileobj.close()
    return reasons


def _listen(address: str, backlog: int) -> tuple[socket.socket | None, tuple[str, int]]:
    """A listening socket at a free port of an address; port 0 if this machine has no such address."""
    with suppress(OSError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=max(1, backlog))
        return listener, (address, listener.getsockname()[1])
    return None, (address, 0)


def _reason(code: int) -> str:
    known = {errno.ECONNREFUSED: "refused", errno.EHOSTUNREACH: "no route", errno.ENETUNREACH: "no route"}
    return known.get(code, errno.errorcode.get(code, str(code)))
