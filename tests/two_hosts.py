"""Run as the first program of a fresh network namespace: make a second host, train on both, tell what crossed.

Each host has an address, a veth interface and a disk (folder) of its own; they share nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def ip(*words: str, pid: int | None = None) -> None:
    inside = ["nsenter", "--net", f"--target={pid}"] if pid else []
    subprocess.run([*inside, "ip", *words], check=True)


def crossed_bytes(device: str) -> int:
    """Received and sent."""
    line = next(x for x in Path("/proc/self/net/dev").read_text().splitlines() if x.strip().startswith(f"{device}:"))
    fields = line.split(":")[1].split()
    return int(fields[0]) + int(fields[8])


def connect(other: int) -> None:
    ip("link", "add", "wire0", "type", "veth", "peer", "name", "wire1", "netns", str(other))
    for pid, device, address in ((None, "wire0", ADDRESSES[0]), (other, "wire1", ADDRESSES[1])):
        ip("address", "add", f"{address}/24", "dev", device, pid=pid)
        ip("link", "set", device, "up", pid=pid)
        ip("link", "set", "lo", "up", pid=pid)


def start(rank: int, folder: Path, arguments: list[str], pid: int | None) -> subprocess.Popen[bytes]:
    world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env = {**os.environ, **world, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    inside = ["nsenter", "--net", f"--target={pid}"] if pid else []
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "thinwire", *arguments], env=env, cwd=folder, stdout=sys.stderr
    )


if __name__ == "__main__":
    base, *arguments = sys.argv[1:]
    host = subprocess.Popen(["unshare", "--net", "sleep", "100"])
    try:
        while os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass
        connect(host.pid)
        before = crossed_bytes("wire0")
        ranks = [start(r, Path(base) / f"host{r}", arguments, host.pid if r else None) for r in range(2)]
        codes = [rank.wait(timeout=90) for rank in ranks]
        print(json.dumps({"bytes": crossed_bytes("wire0") - before}))
    finally:
        host.kill()
        host.wait()
    sys.exit(max(codes))
