"""The processes of benchmarks/floor.py: ranks on hosts or on this machine, and why they ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conditions import Found

from thinwire import netlab


@contextmanager
def started(job: Found, ranks: int, lab: Sequence[netlab.Host] | None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a job, with their logs in its folder; they are gone at the end of the block."""
    folder = Path(job["folder"])
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, str(Path(__file__).resolve().with_name("floor.py")), "--job", str(folder / "job.json")]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads_of(ranks)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if "rows" in job:
        address = lab[0].address if lab else "127.0.0.1"
        env |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(job["ports"][0])}
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            log = stack.enter_context((folder / f"log-{rank}.txt").open("wb"))
            own = {**env, "RANK": str(rank)} if "rows" in job else env
            host = lab[rank * len(lab) // ranks] if lab else None
            start = host.start if host else subprocess.Popen
            process = stack.enter_context(start(command, env=own, stdout=log, stderr=log))
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def threads_of(ranks: int) -> int:
    """Threads of each of so many ranks: its share of the cores, less one for its exchanges."""
    return max(1, len(os.sched_getaffinity(0)) // ranks - 1)


def why(folder: Path) -> str:
    """The first error that a rank left; without one, the end of a log."""
    failures = sorted(folder.glob("failed-*.json"))
    if failures:
        return str(json.loads(failures[0].read_text())["failed"]).splitlines()[0]
    ends = [log.read_text(errors="replace").strip().splitlines()[-1:] for log in sorted(folder.glob("log-*.txt"))]
    return next((end[0] for end in ends if end), "the process ended without a word")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
