"""Hosts of a network: who is not invited connects to every port of a run, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import programs
from thinwire import netlab
from thinwire.netlab import Host, Lab

SECRET = "a secret that no other program knows"
OTHER_ADDRESS = "10.99.0.1"  # of another interface of the host that the run is on
TRAIN = ("-m", "thinwire", "train", "--task", "synthetic", "--epochs", "2", "--ranks", "2")

# Makes another interface on this host, then prints each address and port at which anything on the host listens.
WATCH = f"""
import ipaddress, json, os, sys, threading, time
from pyroute2 import IPRoute
with IPRoute() as ip:
    ip.link("add", ifname="lan", kind="veth", peer={{"ifname": "lan-end"}})
    for name in ("lan", "lan-end"):
        ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")
    ip.addr("add", index=ip.link_lookup(ifname="lan")[0], address="{OTHER_ADDRESS}", prefixlen=24)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
seen = set()
print("ready", flush=True)
while True:
    for table in ("tcp", "tcp6"):
        for row in map(str.split, open(f"/proc/net/{{table}}").read().splitlines()[1:]):
            digits, port = row[1].split(":")
            raw = bytes.fromhex(digits)
            where = ipaddress.ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
            if row[3] == "0A" and (str(where), port) not in seen:
                seen.add((str(where), port))
                print(json.dumps([str(where), int(port, 16)]), flush=True)
    time.sleep(0.02)
"""

# Reads addresses and ports, and connects to each again and again: says nothing, or garbage, or what gloo's ranks say
# first. Keeps what it can open. In the end prints how many connections each address took.
HAMMER = f"""
import json, os, random, socket, struct, sys, threading, time
from pyroute2 import IPRoute
with IPRoute() as ip:
    ip.route("add", dst="10.99.0.0/24", gateway=sys.argv[1])
ports, took, held, begun = set(), {{}}, [], []
def read():
    for line in sys.stdin:
        begun.append(1) if line == "begun\\n" else ports.add(tuple(json.loads(line)))
    print(json.dumps(took), flush=True)
    os._exit(0)
threading.Thread(target=read, daemon=True).start()
print("ready", flush=True)
while True:
    for where, port in sorted(ports):
        for address in (where, "{OTHER_ADDRESS}"):
            numbers = b"".join(struct.pack("<q", n) for n in range(4)) if begun else b""
            for said in (b"", random.randbytes(4096), b"GET / HTTP/1.1\\r\\n\\r\\n", numbers):
                try:
                    one = socket.create_connection((address, port), 1)
                    one.sendall(said)
                    took[address] = took.get(address, 0) + 1
                    held.append(one)
                except OSError:
                    pass
    for one in held[:-200]:
        one.close()
    del held[:-200]
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    try:
        with netlab.hosts(2) as made:
            yield made
    except netlab.NotAllowed as error:
        pytest.skip(str(error))


@contextmanager
def started(host: Host, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program on a host, which ends when its input does."""
    pipe = subprocess.PIPE
    with host.start([sys.executable, "-c", program, *arguments], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def train(host: Host, out: Path, *options: str) -> str:
    """Train on a host; returns what the run says."""
    command = [*programs.python_on(host), *TRAIN, "--out", str(out), *options]
    env = {**os.environ, "PYTHONPATH": str(programs.ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def weights(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def lines(process: subprocess.Popen[str]) -> Sequence[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    return process.stdout.read().splitlines()


@pytest.mark.usefixtures("program_server")
@pytest.mark.timeout(300)
def test_strangers_on_the_network_neither_join_nor_disturb(lab: Lab, tmp_path: Path) -> None:
    here, there = lab
    secret = tmp_path / "secret.txt"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    with started(here, WATCH) as watch:
        train(here, tmp_path / "alone")
        listening = {json.loads(line)[0] for line in lines(watch)}
    assert listening == {"127.0.0.1"}, "without --iface, ranks of one machine listen on loopback"

    seen: set[str] = set()
    out = tmp_path / "hammered"

    def pass_on(found: subprocess.Popen[str], to: subprocess.Popen[str]) -> None:
        assert found.stdout is not None
        assert to.stdin is not None
        for line in found.stdout:
            where = json.loads(line)[0]
            seen.update({where} & {here.address, "127.0.0.1"} or {line})
            to.stdin.write(line)
            to.stdin.flush()

    def say_that_it_began(to: subprocess.Popen[str]) -> None:
        """Ranks have joined: a number that gloo's listeners expect is now as good as any other."""
        assert to.stdin is not None
        while not (out / "config.toml").exists() and passing.is_alive():
            time.sleep(0.01)
        to.stdin.write("begun\n")
        to.stdin.flush()

    with started(here, WATCH.replace('"lan', '"net')) as watch, started(there, HAMMER, here.address) as hammer:
        passing = threading.Thread(target=pass_on, args=(watch, hammer))
        beginning = threading.Thread(target=say_that_it_began, args=(hammer,))
        passing.start()
        beginning.start()
        said = train(here, out, "--iface", netlab.linux.INTERFACE, "--secret-file", str(secret))
        assert watch.stdin is not None
        watch.stdin.close()
        passing.join()
        beginning.join()
        (took,) = map(json.loads, lines(hammer))
    assert took.keys() == {here.address}, "no listener at another interface of that host, nor for others on loopback"
    assert took[here.address] > 20
    assert seen == {here.address, "127.0.0.1"}, "on loopback: the store and each rank's way to its gate"
    assert f"refused a connection from {there.address} to {here.address}:" in said
    assert weights(out) == weights(tmp_path / "alone")
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in said


# Opens a gate at the address of another interface, and prints what it reports.
GATE_ON_LAN = f"""
import socket, sys
from pyroute2 import IPRoute
from thinwire.comm.addresses import addresses_of
from thinwire.comm.gate import Gate
from thinwire.comm.secret import Secret
with IPRoute() as ip:
    ip.link("add", ifname="lan2", kind="veth", peer={{"ifname": "lan2-end"}})
    for name in ("lan2", "lan2-end"):
        ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")
    ip.addr("add", index=ip.link_lookup(ifname="lan2")[0], address="10.98.0.1", prefixlen=24)
store = socket.create_server(("127.0.0.1", 0))
gate = Gate(addresses_of("lan2")[0], 29500, store.getsockname()[1], Secret("{SECRET}"), lambda t: print(t, flush=True))
print("ready", flush=True)
sys.stdin.read()
"""
VISITOR = """
import contextlib, socket, sys
from pyroute2 import IPRoute
with IPRoute() as ip:
    ip.route("add", dst="10.98.0.0/24", gateway=sys.argv[1])
with contextlib.suppress(ConnectionResetError), socket.create_connection(("10.98.0.1", 29500), 10) as gate:
    gate.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    while gate.recv(1000):
        pass
"""


def test_who_routes_to_the_address_of_another_interface_gets_there_and_is_refused(lab: Lab) -> None:
    """Linux takes packets to each of its addresses at every interface: a listener's address alone keeps nobody out."""
    here, there = lab
    with started(here, GATE_ON_LAN) as gate:
        assert gate.stdout is not None
        there.run([sys.executable, "-c", VISITOR, here.address])
        assert f"refused a connection from {there.address} to 10.98.0.1:29500: it offered no" in gate.stdout.readline()
