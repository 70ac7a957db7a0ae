"""The process that holds the store of an elastic run. It outlives ranks, and ends when nobody needs it any more."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.comm.addresses import own_addresses, resolve_host
from thinwire.comm.gate import Passage, refuse_gate
from thinwire.comm.open_store import open_store
from thinwire.comm.secret import forget_variable, read_secret
from thinwire.elastic.notes import ANSWER_SECONDS, Notes, client
from thinwire.errors import RunError, UsageError

IDLE_SECONDS = 60.0  # without a heartbeat: all ranks were lost, or none came
LINGER_SECONDS = 3.0  # the same, once the run is finished


@dataclass(frozen=True)
class FoundStore:
    """The notes in a store, the way there if it is behind a gate, and the process that holds it if we started it."""

    notes: Notes
    passage: Passage | None
    keeper: subprocess.Popen[bytes] | None

    def close(self, is_finished: bool) -> None:
        """Close the way to the store; after the run, wait a moment for its process, which ends once all have gone."""
        if self.passage is not None:
            self.passage.close()
        if self.keeper is not None and is_finished:
            with suppress(subprocess.TimeoutExpired):  # others still need it
                self.keeper.wait(2 * LINGER_SECONDS)


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


def find_store(place: str, secret_file: Path | None = None) -> FoundStore:
    """The store of the run at HOST:PORT. If that is this machine and there is none, it is opened.

    With a secret, in the file or in THINWIRE_SECRET, who does not know it does not reach the store.
    """
    host, port = find_place(place)
    try:
        addresses = resolve_host(host)
    except OSError as error:
        raise UsageError(f"--elastic {place}: nobody knows the name {host} ({error}); give an address") from None
    secret = read_secret(secret_file)
    own = next((one for one in addresses if one in own_addresses()), None)
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


def _open(address: str, port: int, secret_file: Path | None) -> subprocess.Popen[bytes] | None:
    """Start the process that holds the store, unless something listens there: then that is asked."""
    try:
        socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return None
    command = [sys.executable, "-m", "thinwire.elastic.keeper", address, str(port), str(secret_file or "")]
    keeper = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},
    )  # fmt: skip
    assert keeper.stdout is not None
    with keeper.stdout as output:
        if output.readline():
            return keeper
    keeper.wait()  # another rank of this machine was faster
    return None


def hold(address: str, port: int, secret_file: Path | None) -> None:
    """Hold a store until the run is finished and everyone has gone, or until no heart has beaten for a minute."""
    opened = open_store(1, address, port, secret=read_secret(secret_file))
    forget_variable()
    print("listening", flush=True)
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
