"""thinwire lab: any command on hosts that are joined by a slow link, one process on each."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence

from thinwire import netlab
from thinwire.common.formats import format_bytes, format_rate
from thinwire.common.messages import print_line
from thinwire.errors import UsageError
from thinwire.netlab import Lab

PORT = 29500  # of the store on the first host; hosts share no ports with this machine
GRACE_SECONDS = 10.0  # that the others have after one has failed
INTERFACE = "wire"  # of every host
POLL_SECONDS = 0.05
END_SECONDS = 5.0  # that processes have between SIGTERM and SIGKILL


def run_in_lab(command: Sequence[str], nodes: int, link: str) -> int:
    """Run a command on each of so many hosts; returns its exit code, the first that is not 0.

    Variables for torch, and for torchrun, tell each process its place: `torchrun --nproc-per-node 2 my.py` is one world
    of two ranks a host, and `python my.py` of one.
    """
    if not command:
        raise UsageError("lab: no command; try: thinwire lab --link 100mbit -- torchrun --nproc-per-node 2 my.py")
    if nodes < 2:
        raise UsageError(f"lab: --nodes {nodes}; possible: 2 or more")
    with netlab.hosts(nodes, link) as lab:
        measured = lab.measure()
        print_line(
            f"{nodes} hosts with a link of {link} each; measured {format_rate(measured.rate_mbit)} Mbit/s, "
            f"{measured.latency_ms:.2f} ms"
        )
        before = lab.sent_bytes()
        code = _run(command, lab)
        sent = [now["between"] - then["between"] for now, then in zip(lab.sent_bytes(), before, strict=True)]
        each = ", ".join(format_bytes(count) for count in sent)
        print_line(f"sent between hosts, as the Linux kernel counts: {format_bytes(sum(sent))} ({each})")
    return code


def _run(command: Sequence[str], lab: Lab) -> int:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(lab):
            env = {**os.environ, **_place(number, lab)}
            processes.append(host.start(command, env=env, start_new_session=True))
        return _wait(processes)
    finally:
        for process in processes:
            _end(process)


def _place(number: int, lab: Lab) -> dict[str, str]:
    """The environment of a host's process: for torch.distributed, torchrun, gloo and nccl."""
    address, port, count = lab[0].address, str(PORT), str(len(lab))
    return {
        "MASTER_ADDR": address, "MASTER_PORT": port, "RANK": str(number), "WORLD_SIZE": count, "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "PET_MASTER_ADDR": address, "PET_MASTER_PORT": port, "PET_NNODES": count,
        "PET_NODE_RANK": str(number), "GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; if one fails, a little longer for the others."""
    end = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if end == float("inf") and any(process.poll() for process in processes):
            end = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    return next((code for process in processes if (code := process.poll())), 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and of those that it started, which it may have outlived."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + END_SECONDS
        if not _send(process, number):
            return
        while _send(process, 0) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)


def _send(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal (0: none) to what is left of a process and of those that it started; False if nothing is."""
    process.poll()  # else it would be there for as long as nobody asks
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
