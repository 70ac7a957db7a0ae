"""Ranks meet at one address of rank 0's machine, and nobody listens anywhere else."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests import programs
from tests.comm.test_addresses import LAN, OWN
from thinwire.comm import store
from thinwire.comm.addresses import addresses_of
from thinwire.comm.join import agree_on_backend
from thinwire.comm.store import rendezvous
from thinwire.comm.world import World
from thinwire.errors import RunError, UsageError

SCRIPT = """
import sys
import thinwire as tw
from tests.comm.test_store import listening
with tw.join(iface=sys.argv[1]) as comm:
    comm.barrier()
    print(*sorted(listening()))
    comm.barrier()
"""


def listening() -> set[str]:
    """The addresses that this process listens at, by the Linux kernel's tables."""
    links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in own:
                raw = bytes.fromhex(local.split(":")[0])
                address = ipaddress.ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def free_port(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as free:
        return str(free.getsockname()[1])


def ranks(
    folder: Path, port: str, master: str | None = None, iface: str = "auto", size: int = 2
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank of a world: one started by hand, or as mpirun does without a master."""
    script = folder / "listening.py"
    script.write_text(SCRIPT)
    world = {"MASTER_PORT": port, "PYTHONPATH": str(programs.ROOT)}
    if master is None:
        world |= {"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}
    else:
        world |= {"MASTER_ADDR": master, "WORLD_SIZE": str(size)}
    number = "RANK" if master else "OMPI_COMM_WORLD_RANK"
    started = [
        subprocess.Popen(
            [*programs.PYTHON, str(script), iface], env={**os.environ, **world, number: str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [one.communicate(timeout=60) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    return [(one.returncode, *output) for one, output in zip(started, outputs, strict=True)]


@pytest.mark.usefixtures("program_server")
@pytest.mark.parametrize("master", ["127.0.0.2", *[a for a in ("::1",) if a in OWN]])
def test_the_store_listens_at_master_addr_alone_and_gloo_on_the_interface_that_leads_there(
    master: str, tmp_path: Path
) -> None:
    found = ranks(tmp_path, free_port(master), master)
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[0][1].split() == sorted({master, "127.0.0.1"})
    assert found[1][1].split() == ["127.0.0.1"]


@pytest.mark.usefixtures("program_server")
@pytest.mark.parametrize("iface", sorted({OWN[address] for address in LAN} | {"lo"}))
def test_with_an_interface_everything_listens_there(iface: str, tmp_path: Path) -> None:
    """On one machine nobody need say where: the first address of the interface is the store's."""
    (address, *_) = addresses_of(iface)
    found = ranks(tmp_path, free_port(address), iface=iface)
    assert [code for code, _, _ in found] == [0, 0], found
    assert [out.split() for _, out, _ in found] == [[address], [address]]


def test_a_master_that_is_not_on_the_interface_is_refused_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"127.0.0.1": "lo", "10.0.0.7": "eth0", "10.1.0.7": "eth1"}
    for module in ("store", "addresses"):
        monkeypatch.setattr(f"thinwire.comm.{module}.own_addresses", lambda: known)
    monkeypatch.setattr(store, "interface_to", known.get)
    with pytest.raises(UsageError, match=r"--iface eth1 has 10.1.0.7, but .* is 10.0.0.7; set MASTER_ADDR=10.1.0.7 on"):
        rendezvous(world("10.0.0.7", port=29502), "eth1")
    listened_at = []
    monkeypatch.setattr(store, "open_store", lambda size, address, *_: listened_at.append(address))
    monkeypatch.setattr(store, "resolve_host", lambda host: ("10.0.0.7", "10.1.0.7"))
    store._open_store(world("node7", port=29503), "eth1")
    monkeypatch.setattr(store, "resolve_host", lambda host: ("127.0.1.1",))
    store._open_store(world("node8", port=29503), "eth0")
    assert listened_at == ["10.1.0.7", "10.0.0.7"], "one of the name's addresses; what others take the name for"


@pytest.mark.parametrize(
    ("choices", "agreed"), [(["nccl", "nccl"], "nccl"), (["nccl", "gloo"], "gloo"), (["gloo", "gloo"], "gloo")]
)
def test_ranks_use_nccl_only_if_all_of_them_can(choices: list[str], agreed: str) -> None:
    shared = HashStore()
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda rank: agree_on_backend(shared, world("h", rank), choices[rank]), range(2))
    assert list(found) == [agreed] * 2


def world(address: str, rank: int = 0, port: int = 29500) -> World:
    return World(rank, 2, local_rank=0, local_size=1, address=address, port=port, launcher="torchrun")


def test_an_address_of_another_machine_is_refused_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        rendezvous(world("192.0.2.77"))
    for part in ("192.0.2.77 is no address of this machine", socket.gethostname(), "127.0.0.1", "set MASTER_ADDR"):
        assert part in str(caught.value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    with pytest.raises(UsageError, match="give torchrun on each machine --local-addr"):
        rendezvous(world("192.0.2.77", port=29501))


def test_a_name_that_stands_for_this_machine_alone_is_refused_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian has the host's own name stand for 127.0.1.1, where no other machine could reach it."""
    monkeypatch.setattr(store, "resolve_host", lambda host: ("127.0.1.1",))
    with pytest.raises(UsageError, match=r"node7 \(127.0.1.1\) is this machine alone.*set MASTER_ADDR"):
        rendezvous(world("node7"))


@pytest.mark.parametrize(("rank", "name"), [(0, "gpu03.invalid"), (1, "gpu03.invalid"), (1, "gpu..03")])
def test_a_name_that_nobody_knows_is_told_once_and_then_an_error(
    rank: int, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "RESOLVE_SECONDS", 0.05)
    with pytest.raises(RunError, match=rf"nobody knows the name {name}.*set MASTER_ADDR on every rank"):
        rendezvous(world(name, rank))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"rank {rank} cannot find rank 0's machine: nobody knows the name {name} (")
    assert line.endswith("trying again for 0.05 s")


def test_a_rank_that_waits_at_an_address_of_this_machine_alone_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(free_port("127.0.0.1"))
    monkeypatch.setattr(store, "WAIT_QUIETLY_SECONDS", 0.01)
    monkeypatch.setattr(store, "JOIN_SECONDS", 0.5)
    with pytest.raises(RunError, match="did not meet all 2 ranks at 127"):
        rendezvous(world("127.0.0.1", port=port))
    said = capfd.readouterr().err
    assert f"rank 0 is waiting at 127.0.0.1:{port} for all 2 ranks; 127.0.0.1 reaches this machine alone" in said


def test_a_second_join_with_another_interface_uses_the_store_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(free_port("127.0.0.1"))
    monkeypatch.setattr(store, "JOIN_SECONDS", 0.2)
    for iface in ("lo", "auto", "lo"):
        with pytest.raises(RunError, match="did not meet all 2 ranks"):  # not: the address is in use
            rendezvous(world("127.0.0.1", port=port), iface)
