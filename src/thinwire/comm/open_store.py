"""Stores that a process opens, or that others have opened: with a secret, behind a gate."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from thinwire.comm.gate import Gate, Passage, refuse_gate
from thinwire.comm.relays import listen
from thinwire.comm.secret import Secret
from thinwire.common.messages import print_line

STORE_SECONDS = 300.0  # that an operation of a store waits unless it says how long


@dataclass(frozen=True)
class OpenStore:
    """A store, the address and port at which all ranks reach it, and the gate in front of it or the passage to one."""

    store: dist.TCPStore
    address: str
    port: int
    door: Gate | Passage | None = None

    def close(self) -> None:
        """End the connections through a gate. The store itself ends with the last that refers to it."""
        if self.door is not None:
            self.door.close()


def open_store(
    num_ranks: int,
    address: str = "127.0.0.1",
    port: int = 0,
    seconds: float = STORE_SECONDS,
    secret: Secret | None = None,
    report: Callable[[str], None] = print_line,
) -> OpenStore:
    """Open a store at one address, by default at a free port; with a secret, on loopback behind a gate at that address.

    The gate reports whom it refuses.

    >>> opened = open_store(1)
    >>> opened.store.set("key", "value"); opened.store.get("key")
    b'value'
    """
    if secret is None:
        store = _listen_at(address, port, num_ranks, seconds)
        return OpenStore(store, address, store.port)
    store = _listen_at("127.0.0.1", 0, num_ranks, seconds)
    gate = Gate(address, port, store.port, secret, report)
    return OpenStore(store, address, gate.port, gate)


def reach_store(
    num_ranks: int, address: str, port: int, seconds: float = STORE_SECONDS, secret: Secret | None = None
) -> OpenStore:
    """The store that another process has opened, or will open within so many seconds."""
    door, here = None, (address, port)
    if secret is None:
        refuse_gate(address, port, time.monotonic() + seconds)
    else:
        door = Passage(address, port, secret, seconds)
        here = ("127.0.0.1", door.port)
    timeout = datetime.timedelta(seconds=seconds)
    return OpenStore(dist.TCPStore(*here, num_ranks, False, timeout, wait_for_workers=False), address, port, door)


def _listen_at(address: str, port: int, num_ranks: int, seconds: float) -> dist.TCPStore:
    """A store that listens at one address only. A store that torch opens itself listens on every interface."""
    listener = listen(address, port)
    port, timeout = listener.getsockname()[1], datetime.timedelta(seconds=seconds)
    return dist.TCPStore(
        address, port, num_ranks, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
