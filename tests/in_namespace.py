"""Run as the only program of a fresh network namespace: bring loopback up, train, tell what went over it."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        flags = struct.unpack("16sH22x", request)[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))


def sent_bytes() -> int:
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    ranks, model, out = sys.argv[1:]
    loopback_up()
    before = sent_bytes()
    command = [
        sys.executable,
        "-m",
        "thinwire",
        "train",
        "--ranks",
        ranks,
        "--model",
        model,
        "--epochs",
        "4",
        "--out",
        out,
    ]
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    print(json.dumps({"bytes": sent_bytes() - before}))
    sys.exit(code)
