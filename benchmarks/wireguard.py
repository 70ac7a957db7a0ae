"""What WireGuard hides and costs: two hosts of this machine sum a marked tensor, without and with a tunnel.

    python benchmarks/wireguard.py --json docs/wireguard.json     # as root, a minute
    python benchmarks/wireguard.py --render                       # the table of docs/security.md

The tunnel is that of examples/wireguard. The link carries frames of 1,500 bytes, as Ethernet does. Bytes are those that
the Linux kernel counts on the wire; times are ratios of one run. A capture of all packets looks for the mark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire import netlab
from thinwire.netlab import Host, Lab, linux

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "wireguard"
MARK = b"thinwire marks this tensor here."
PROGRAMS = ("ip", "wg", "wireguard-go")
PORT = 29500
CAPTURE = """
import json, socket, sys, threading
mark, packets, marked, size = sys.argv[2].encode(), 0, 0, 0
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
    wire.setsockopt(socket.SOL_SOCKET, 33, 2**27)  # SO_RCVBUFFORCE
    wire.bind((sys.argv[1], 0))
    wire.settimeout(0.2)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print("ready", flush=True)
    while True:
        try:
            packet = wire.recv(2**17)
        except TimeoutError:
            if ended.is_set():
                break
            continue
        packets, size, marked = packets + 1, size + len(packet), marked + (mark in packet)
    dropped = int.from_bytes(wire.getsockopt(263, 6, 8)[4:], sys.byteorder)  # PACKET_STATISTICS
print(json.dumps({"packets": packets, "bytes": size, "marked": marked, "dropped": dropped}))
"""


def why_not() -> str | None:
    """Why there can be no tunnel here."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found; as root: make tunnel"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened; run as root, in a container with --device /dev/net/tun"
    return None


# ---- the program of a rank


def rank(iface: str, megabytes: float, repeats: int) -> None:
    """Sum a tensor with the other rank, and print how long each sum took. Rank 0's tensor has the mark all over."""
    with tw.join(iface=iface) as comm:
        size = int(megabytes * 1e6) // len(MARK)
        text = MARK * size if comm.rank == 0 else bytes(len(MARK) * size)
        tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        seconds = []
        for _ in range(repeats):
            comm.barrier()
            begin = time.perf_counter()
            total = comm.sum(tensor)
            seconds.append(time.perf_counter() - begin)
        assert bytes(total.numpy().tobytes()) == MARK * size
        comm.barrier()
        print(json.dumps(seconds), flush=True)


# ---- hosts, tunnel, capture


@contextmanager
def tunnel(lab: Lab) -> Iterator[list[tuple[str, str]]]:
    """The tunnel of the example between two hosts; each one's interface and address in it."""
    ends = [(f"twwg{i}", f"10.88.0.{i + 1}") for i in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        private = [_output("wg", "genkey") for _ in ends]
        public = [_output("wg", "pubkey", given=key) for key in private]
        template = (EXAMPLE / "wg0.conf").read_text()
        try:
            for i, (host, (name, address)) in enumerate(zip(lab, ends, strict=True)):
                conf, other = Path(folder, f"{name}.conf"), 1 - i
                conf.touch(mode=0o600)
                words = {
                    "PRIVATE_KEY_OF_THIS_MACHINE": private[i], "PUBLIC_KEY_OF_THE_OTHER_MACHINE": public[other],
                    "10.88.0.2/32": f"{ends[other][1]}/32", "192.168.1.6": lab[other].address,
                }  # fmt: skip
                text = template
                for word, value in words.items():
                    assert word in text
                    text = text.replace(word, value)
                conf.write_text(text)
                host.run([str(EXAMPLE / "up.sh"), str(conf), f"{address}/24"])
            yield ends
        finally:
            for host, (name, _) in zip(lab, ends, strict=True):
                host.run(["sh", "-c", f"ip link del {name} 2> /dev/null; true"])  # wireguard-go ends with it


def _output(*command: str, given: str | None = None) -> str:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def capture(host: Host, found: dict[str, Any]) -> Iterator[None]:
    """Look at every packet on a host's wire; `found` then has their number, bytes, and how many had the mark."""
    command = [sys.executable, "-c", CAPTURE, linux.INTERFACE, MARK.decode()]
    pipe = subprocess.PIPE
    with host.start(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()
        found.update(json.loads(process.stdout.read()))


def sums(lab: Lab, ends: list[tuple[str, str]], megabytes: float, repeats: int) -> tuple[list[float], int]:
    """Seconds of each sum, and bytes that both hosts sent on the wire in all."""
    before = sum(one["between"] for one in lab.sent_bytes())
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ends[0][1], "MASTER_PORT": str(PORT)}
    env = {**os.environ, **world, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                host.start(
                    [sys.executable, __file__, "--rank", name, str(megabytes), str(repeats)],
                    env={**env, "RANK": str(number)}, stdout=subprocess.PIPE, text=True,
                )
            )
            for number, (host, (name, _)) in enumerate(zip(lab, ends, strict=True))
        ]  # fmt: skip
        try:
            printed = [one.communicate(timeout=200)[0] for one in ranks]
        finally:
            for one in ranks:
                one.kill()
    after = sum(one["between"] for one in lab.sent_bytes())
    return [max(pair) for pair in zip(*map(json.loads, printed), strict=True)], after - before


def measure(link: str, megabytes: float, repeats: int) -> dict[str, Any]:
    """One link: sums in clear and through the tunnel, and what a capture of one sum sees of each."""
    rows: dict[str, Any] = {}
    with netlab.hosts(2, link) as lab:
        for host in lab:  # frames as on Ethernet, each counted with its headers
            host.run(["ip", "link", "set", "dev", linux.INTERFACE, "mtu", "1500", "gso_max_segs", "1"])
        with tunnel(lab) as inside:
            outside = [(linux.INTERFACE, host.address) for host in lab]
            for name, ends in (("clear", outside), ("wireguard", inside)):
                seen: dict[str, Any] = {}
                with capture(lab[0], seen):
                    sums(lab, ends, megabytes / 4, 1)
                seconds, sent = sums(lab, ends, megabytes, repeats)
                rows[name] = {"captured": seen, "sent_bytes": sent, "seconds": seconds}
    return {"link": link, "megabytes": megabytes, "repeats": repeats, **rows}


# ---- results


def table(results: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| link | network | bytes on the wire for each byte of tensor | time of a sum | packets with the mark |"]
    lines += ["|---|---|--:|--:|--:|"]
    for one in results:
        clear = statistics.median(one["clear"]["seconds"])
        for name in ("clear", "wireguard"):
            row = one[name]
            share = row["sent_bytes"] / (2e6 * one["megabytes"] * one["repeats"])  # each of two ranks sends it once
            ratio = statistics.median(row["seconds"]) / clear
            captured = row["captured"]
            lines.append(
                f"| {one['link']} | {name} | {share:.3f} | {ratio:.2f} | "
                f"{captured['marked']:,} of {captured['packets']:,} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--render", action="store_true", help="print the table of docs/wireguard.json")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank[0], float(args.rank[1]), int(args.rank[2]))
        return
    if args.render:
        print(table(json.loads((ROOT / "docs" / "wireguard.json").read_text())))
        return
    if why := why_not():
        sys.exit(why)
    results = [measure(link, 8.0, 7) for link in ("20mbit", "100mbit")]
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
