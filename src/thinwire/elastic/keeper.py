"""The process that holds the store of an elastic run. It outlives ranks, and ends when nobody needs it any more."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
import time

from thinwire.comm.addresses import own_addresses, resolve_host
from thinwire.elastic.notes import ANSWER_SECONDS, Notes, client
from thinwire.errors import RunError, UsageError

IDLE_SECONDS = 60.0  # without a heartbeat: all ranks were lost, or none came
LINGER_SECONDS = 3.0  # the same, once the run is finished


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


Keeper = subprocess.Popen[bytes]


def find_store(place: str) -> tuple[Notes, Keeper | None]:
    """The notes of the run whose store is at HOST:PORT. If that is this machine and there is none, open one.

    Then the process that holds it is returned, too.
    """
    host, port = find_place(place)
    try:
        addresses = resolve_host(host)
    except OSError as error:
        raise UsageError(f"--elastic {place}: nobody knows the name {host} ({error}); give an address") from None
    address = next((one for one in addresses if one in own_addresses()), None)
    keeper = None if address is None else _open(address, port)
    try:
        return Notes(lambda: client(address or addresses[0], port), place), keeper
    except RunError as error:
        raise RunError(
            f"no store answers at {place}; start a rank on that machine first, and check the port and the firewall "
            f"({error.__cause__})"
        ) from error


def _open(address: str, port: int) -> Keeper | None:
    """Start the process that holds the store, unless something listens there: then that is asked."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family)
    except OSError:
        return None
    with listener:
        command = [sys.executable, "-m", "thinwire.elastic.keeper", address, str(port), str(listener.fileno())]
        return subprocess.Popen(
            command, pass_fds=[listener.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},
        )  # fmt: skip


def hold(address: str, port: int, listener: int) -> None:
    """Hold a store until the run is finished and everyone has gone, or until no heart has beaten for a minute."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=ANSWER_SECONDS)
    store = dist.TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener)
    beats, since = 0, time.monotonic()
    while True:
        time.sleep(0.2)
        now, hearts = store.add("beats", 0), store.add("hearts", 0)
        if now != beats:
            beats, since = now, time.monotonic()
        is_finished, silent = store.check(["finished"]), time.monotonic() - since
        if silent > IDLE_SECONDS or (is_finished and (hearts <= 0 or silent > LINGER_SECONDS)):
            return


if __name__ == "__main__":
    hold(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
