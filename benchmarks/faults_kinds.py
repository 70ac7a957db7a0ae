"""The faults of benchmarks/faults.py: each happens to a run in its box, and is over when the function returns."""

from __future__ import annotations

import atexit
import functools
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from faults_box import Box, Running

from thinwire.netlab import linux

CLOCK = Path(__file__).with_name("faults_clock.c")
JUMPS = {"an hour ahead": 3600, "an hour back": -3600, "ten years ahead": 315_360_000, "ten years back": -315_360_000}
RATE_MBIT, SLOW_SHARE = 100, 0.01  # of the link, and what is left of it when it is slow


class Fault(NamedTuple):
    """A kind of fault. `inject` returns what it did, in words, or "" if it came too late."""

    inject: Callable[[Running, random.Random, float], str]
    seconds: float = 0.0  # that it takes
    on_links: bool = False  # ranks are on hosts of netlab
    ends_run: bool = False  # it always ends the run
    says: str = ""  # words of the message with which the run then ends
    clock: bool = False  # the run has a wall clock of its own


def kill_rank(run: Running, choose: random.Random, seconds: float) -> str:
    """kill -9."""
    ranks = run.ranks()
    if not ranks:
        return ""
    rank = choose.randrange(len(ranks))
    return f"killed process {ranks[rank]}, rank {rank}" if _signal(ranks[rank], signal.SIGKILL) else ""


def kill_launcher(run: Running, choose: random.Random, seconds: float) -> str:
    """kill -9."""
    launcher = run.launcher()
    return "killed the launcher" if launcher and _signal(launcher, signal.SIGKILL) else ""


def stop_rank(run: Running, choose: random.Random, seconds: float) -> str:
    """SIGSTOP, and SIGCONT after some seconds."""
    ranks = run.ranks()
    if not ranks:
        return ""
    rank = choose.randrange(len(ranks))
    if not _signal(ranks[rank], signal.SIGSTOP):
        return ""
    time.sleep(seconds)
    _signal(ranks[rank], signal.SIGCONT)
    return f"stopped rank {rank}"


def link_down(run: Running, choose: random.Random, seconds: float) -> str:
    """The cable of a host is pulled at the switch, and put back after some seconds."""
    return _change_link(run, choose, seconds, "down")


def link_slow(run: Running, choose: random.Random, seconds: float) -> str:
    """The link of a host has one per cent of its rate in both directions, for some seconds."""
    return _change_link(run, choose, seconds, "slow")


def fill_disk(run: Running, choose: random.Random, seconds: float) -> str:
    """The disk of the run's folder stays full until the run ends."""
    filler = run.box.disk_seen / "filler"
    with filler.open("ab", buffering=0) as file:
        while not run.has_ended():
            for size in (2**16, 2**12):
                with suppress(OSError):  # it is full
                    while not run.has_ended():
                        file.write(bytes(size))
            time.sleep(0.002)
    filler.unlink()
    return "filled the disk"


def truncate_newest(box: Box, out: Path, choose: random.Random) -> str:
    """A file of a rank's newest checkpoint loses its end."""
    manifests = sorted((out / "checkpoints").glob("step-*/rank-*.json"))
    newest = [file for file in manifests if file.parent == manifests[-1].parent]
    if not newest:
        return ""
    manifest = choose.choice(newest)
    file = choose.choice([manifest, manifest.with_suffix(".safetensors")])
    left = choose.randrange(file.stat().st_size)
    os.truncate(file, left)
    return f"cut {file.parent.name}/{file.name} to {left} bytes"


def jump_clock(run: Running, choose: random.Random, seconds: float) -> str:
    """The wall clock of all processes of the run jumps."""
    name = choose.choice(list(JUMPS))
    with (run.box.folder / "clock").open("r+b") as file:  # it is mapped: never empty
        file.write(struct.pack("q", JUMPS[name]))
    return f"the clock jumped {name}" if not run.has_ended() else ""


def clock_env(box: Box) -> dict[str, str]:
    """The variables of a run whose wall clock can jump."""
    (box.folder / "clock").write_bytes(struct.pack("q", 0))
    return {"LD_PRELOAD": _clock_library(), "CLOCK_FILE": str(box.folder / "clock")}


@functools.cache
def _clock_library() -> str:
    """The compiled faults_clock.c, in a folder that goes with this process."""
    folder = tempfile.mkdtemp(prefix="faults-clock-")
    atexit.register(shutil.rmtree, folder)
    library = f"{folder}/clock.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, str(CLOCK), "-ldl"], check=True)
    return library


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


# ---- links: a process forks one that enters the hosts' namespaces, which belong to the process that holds them


class Links:
    """The process that changes links. It has imported what that needs, so a link changes when it is to."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)
        self._lock = threading.Lock()
        self._ask("ready?")

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=20)

    def set(self, keeper: int, host: int, state: str) -> bool:
        """Set the link of a host to normal, down or slow; False if it is not there any more."""
        return self._ask(f"{keeper} {host} {state}") == "done"

    def _ask(self, request: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
            return self._process.stdout.readline().strip()


open_links: list[Links] = []  # one at most


@contextmanager
def changing_links() -> Iterator[None]:
    """Inside, faults can change links."""
    with closing(Links()) as links:
        open_links.append(links)
        try:
            yield
        finally:
            open_links.remove(links)


def _change_link(run: Running, choose: random.Random, seconds: float, change: str) -> str:
    keeper = run.keeper()
    host = choose.randrange(len(run.ranks()) or 1)
    if keeper is None or not open_links[0].set(keeper, host, change):
        return ""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not run.has_ended():
        time.sleep(0.05)
    open_links[0].set(keeper, host, "normal")
    return f"the link of host {host} was {change}"


def serve_links() -> None:
    """Change links as requests on stdin say, each in a process of its own, which enters other namespaces."""
    import pyroute2  # noqa: F401

    import thinwire.netlab.keeper  # noqa: F401

    for request in sys.stdin:
        words = request.split()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if len(words) == 3:
                    set_link(int(words[0]), int(words[1]), words[2])
                code = 0
            finally:
                os._exit(code)
        print("gone" if os.waitpid(child, 0)[1] else "done", flush=True)


def set_link(keeper: int, host: int, state: str) -> None:
    """Set the link of a host to normal, down or slow."""
    from pyroute2 import IPRoute

    from thinwire.netlab.keeper import HEADERS_BYTES, QUEUE_BYTES, ROOT_QUEUE, frames
    from thinwire.netlab.link import Link

    user = f"/proc/{keeper}/ns/user"
    if os.readlink(user) != os.readlink("/proc/self/ns/user"):
        linux.setns(user, linux.CLONE_NEWUSER)
    share = SLOW_SHARE if state == "slow" else 1.0
    rate, packet = round(share * RATE_MBIT * 1e6 / 8), frames(Link(RATE_MBIT), False).packet_bytes
    wire, port = _namespaces(keeper, host)
    for namespace, name in ((wire, linux.INTERFACE), (port, f"port{host}")):
        linux.setns(namespace, linux.CLONE_NEWNET)
        with IPRoute() as ip:
            (index,) = ip.link_lookup(ifname=name)
            burst = packet + HEADERS_BYTES
            ip.tc("change", "tbf", index, rate=rate, burst=burst, limit=QUEUE_BYTES, handle=ROOT_QUEUE)
            if name != linux.INTERFACE:
                ip.link("set", index=index, state="down" if state == "down" else "up")


def _namespaces(keeper: int, host: int) -> tuple[str, str]:
    """The paths of the network namespaces of a host and of the switch, in the order in which the keeper opened them."""
    files = sorted(Path(f"/proc/{keeper}/fd").iterdir(), key=lambda path: int(path.name))
    found: dict[str, str] = {}
    for file in files:
        with suppress(OSError):
            if (target := os.readlink(file)).startswith("net:"):
                found.setdefault(target, str(file))
    switch, *hosts = found.values()
    return hosts[host], switch


FAULTS = {
    "kill -9 of a rank": Fault(kill_rank, says="SIGKILL"),
    "kill -9 of the launcher": Fault(kill_launcher, ends_run=True),
    "a rank stopped for 20 s": Fault(stop_rank, seconds=20),
    "link down for 10 s": Fault(link_down, seconds=10, on_links=True),
    "link at 1 % for 30 s": Fault(link_slow, seconds=30, on_links=True),
    "disk full at a checkpoint": Fault(fill_disk, ends_run=True, says="free some space and --resume"),
    "newest checkpoint cut off": Fault(kill_rank, ends_run=True, says="SIGKILL"),
    "clock jump": Fault(jump_clock, clock=True),
}

if __name__ == "__main__":
    serve_links()
