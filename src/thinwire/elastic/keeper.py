"""The process that holds the store of an elastic run. It outlives ranks, and ends when nobody needs it any more."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from thinwire.comm.addresses import AUTO, addresses_of, own_addresses, resolve_host
from thinwire.comm.gate import Passage, refuse_gate
from thinwire.comm.open_store import open_store
from thinwire.comm.relays import hang_up
from thinwire.comm.secret import forget_variable, read_secret
from thinwire.common.messages import print_line
from thinwire.elastic.notes import ANSWER_SECONDS, Notes, client
from thinwire.errors import RunError, UsageError

IDLE_SECONDS = 60.0  # without a heartbeat: all ranks were lost, or none came
LINGER_SECONDS = 3.0  # the same, once the run is finished
LISTENING = "listening"  # what the process says first


@dataclass(frozen=True)
class Keeper:
    """The process that holds a store, and where we hear whom it refuses. It may outlive us: then nobody hears it."""

    process: subprocess.Popen[bytes]
    ear: socket.socket


@dataclass(frozen=True)
class FoundStore:
    """The notes in a store, the way there if it is behind a gate, and the process that holds it if we started it."""

    notes: Notes
    passage: Passage | None
    keeper: Keeper | None

    def close(self, is_finished: bool) -> None:
        """Close the way to the store; after the run, wait a moment for its process, which ends once all have gone."""
        if self.passage is not None:
            self.passage.close()
        if self.keeper is not None and is_finished:
            with suppress(subprocess.TimeoutExpired):  # others still need it
                self.keeper.process.wait(2 * LINGER_SECONDS)
        if self.keeper is not None:
            hang_up(self.keeper.ear)  # its thread then ends


def find_place(text: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT; UsageError for anything else.

    >>> find_place("10.0.0.1:29400"), find_place("[::1]:29400")
    (('10.0.0.1', 29400), ('::1', 29400))
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UsageError(f"--elastic {text!r} is no HOST:PORT; give an address of one machine, as 10.0.0.1:29400")
    return host, int(port)


def find_store(place: str, secret_file: Path | None = None, iface: str = AUTO) -> FoundStore:
    """The store of the run at HOST:PORT. If that is this machine and there is none, it is opened.

    It listens at HOST, which must be an address of the interface `iface` if it is this machine. With a secret, in the
    file or in THINWIRE_SECRET, who does not know it does not reach the store.
    """
    host, port = find_place(place)
    try:
        addresses = resolve_host(host)
    except OSError as error:
        raise UsageError(f"--elastic {place}: nobody knows the name {host} ({error}); give an address") from None
    secret = read_secret(secret_file)
    own = _own_address(addresses, place, port, iface)
    keeper, address = None if own is None else _open(own, port, secret_file), own or addresses[0]
    passage, reached = None, (address, port)
    try:
        if secret is None:
            refuse_gate(address, port, time.monotonic() + ANSWER_SECONDS)
        else:
            passage = Passage(address, port, secret, ANSWER_SECONDS)
            reached = ("127.0.0.1", passage.port)
        notes = Notes(lambda: client(*reached), place, secret)
    except (OSError, RunError) as error:
        raise RunError(
            f"no store answers at {place}; start a rank on that machine first, and check the port and the firewall "
            f"({error.__cause__ or error})"
        ) from error
    forget_variable()
    return FoundStore(notes, passage, keeper)


def _own_address(addresses: Sequence[str], place: str, port: int, iface: str) -> str | None:
    """Where the store listens if it is on this machine; UsageError if that is not on the interface."""
    here = {one: name for one, name in own_addresses().items() if one in addresses}
    if iface != AUTO:
        possible = addresses_of(iface)
        if here and iface not in here.values():
            there = ", ".join(f"{one} ({name})" for one, name in here.items())
            raise UsageError(
                f"--iface {iface} has {', '.join(possible)}, but the store of --elastic {place} listens at {there}; "
                f"give --elastic {_spelled(possible[0])}:{port} on every rank, or name another interface"
            )
    return next((one for one in addresses if one in here and iface in (AUTO, here[one])), None)


def _spelled(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _open(address: str, port: int, secret_file: Path | None) -> Keeper | None:
    """Start the process that holds the store, unless something listens there: then that is asked."""
    try:
        socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return None
    command = [sys.executable, "-m", "thinwire.elastic.keeper", address, str(port), str(secret_file or "")]
    ear, mouth = socket.socketpair()
    with mouth:
        process = subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=mouth.fileno(), stderr=subprocess.DEVNULL,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},
        )  # fmt: skip
    said = ear.makefile(encoding="utf-8", errors="replace")
    for line in said:
        if line == f"{LISTENING}\n":
            threading.Thread(target=_pass_on, args=(ear, said), name="thinwire-elastic-keeper", daemon=True).start()
            return Keeper(process, ear)
        print_line(line.rstrip())  # somebody was refused already
    process.wait()  # another rank of this machine was faster
    said.close()
    ear.close()
    return None


def _pass_on(ear: socket.socket, said: TextIO) -> None:
    """Print what the process of the store reports, until it ends or `ear` is hung up."""
    with ear, said, suppress(OSError):
        for line in said:
            print_line(line.rstrip())


def _report(text: str) -> None:
    """Tell the rank that started this process."""
    with suppress(OSError):  # it has gone
        os.write(1, f"{text}\n".encode())


def hold(address: str, port: int, secret_file: Path | None) -> None:
    """Hold a store until the run is finished and everyone has gone, or until no heart has beaten for a minute."""
    opened = open_store(1, address, port, secret=read_secret(secret_file), report=_report)
    forget_variable()
    _report(LISTENING)
    beats, since = 0, time.monotonic()
    while True:
        time.sleep(0.2)
        signal.alarm(
            int(IDLE_SECONDS)
        )  # ends this process if its own address is gone, and so its store does not answer
        now, hearts = opened.store.add("beats", 0), opened.store.add("hearts", 0)
        if now != beats:
            beats, since = now, time.monotonic()
        is_finished, silent = opened.store.check(["finished"]), time.monotonic() - since
        if silent > IDLE_SECONDS or (is_finished and (hearts <= 0 or silent > LINGER_SECONDS)):
            opened.close()
            return


if __name__ == "__main__":
    hold(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3] else None)
