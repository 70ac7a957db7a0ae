"""What doctor finds: in facts and measurements that are given, and in real worlds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import thinwire as tw
from tests import programs
from tests.test_cli import call
from thinwire import netlab
from thinwire.advice import machine, wire
from thinwire.advice.diagnosis import Diagnosis
from thinwire.advice.doctor import alone, not_measured
from thinwire.advice.doctor_table import diagnosis_table
from thinwire.advice.facts import Facts, listening_addresses, look
from thinwire.advice.findings import Finding
from thinwire.advice.measurements import Measurements, announcement, measure_world
from thinwire.comm.join import WORLD_OF_ONE
from thinwire.comm.link_probe import PairLink
from thinwire.comm.reach import Unreached, find_unreached, gather_through, try_connections
from thinwire.comm.world import World
from thinwire.config import RunConfig
from thinwire.run.network import LinkReport

ROOT = Path(__file__).parent.parent.parent
TWO = World(rank=0, size=2, local_rank=0, local_size=1, address="10.0.0.1", port=29500, launcher="srun")
VERSIONS = {"python": "3.11.7", "torch": "2.11.0", "thinwire": "0.1"}
KEYS = {
    "ok", "launcher", "ranks", "nodes", "versions", "findings", "links", "compute_gflops", "clocks_seconds", "machines",
}  # fmt: skip


def facts(**changes: Any) -> Facts:
    """A machine on which all is well."""
    well = Facts(
        host="a", node="1/0", local_ranks=1, versions=VERSIONS,
        backend="gloo", device="CPU", cpu="EPYC", cores=4, threads=3, interface="eth0", address="10.0.0.1",
        addresses={"127.0.0.1": "lo", "10.0.0.1": "eth0"}, name_addresses=["10.0.0.1"], store_listens_at=["10.0.0.1"],
        open_files=1024, memory_bytes=8 * 10**9, folder="/tmp", folder_bytes=10**11, folder_is_writable=True,
        hosts_error="",
    )  # fmt: skip
    return replace(well, **changes)


def pair(**changes: Any) -> list[Facts]:
    """Two machines, of which the second one differs."""
    return [facts(), facts(**{"host": "b", "node": "2/0", "address": "10.0.0.2", "store_listens_at": [], **changes})]


def found_in(machines: list[Facts], title: str) -> Finding:
    return next(one for one in machine.machine_findings(machines, TWO) if one.title == title)


def measured(**changes: Any) -> Measurements:
    """Two nodes on which all is well."""
    link = PairLink(20_000.0, 0.1)
    well = Measurements(
        probed=[0, 1], firsts=[0, 1], nodes=[0, 1], links=[[None, link], [link, None]], ring=link, clocks=[0.0, 0.001],
        compute=[100.0, 90.0], segments=[1000, 1000], retransmitted=[0, 1],
    )  # fmt: skip
    return well._replace(**changes)


def wire_levels(**changes: Any) -> dict[str, str]:
    return {one.title: one.level for one in wire.wire_findings(measured(**changes), LinkReport(), None)}


# ---- machines


def test_two_machines_on_which_all_is_well() -> None:
    assert {one.level for one in machine.machine_findings(pair(), TWO)} == {"ok"}
    assert set(wire_levels().values()) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "title", "level", "words"),
    [
        ({"versions": {**VERSIONS, "torch": "2.9.0"}}, "versions", "failure", "2.11.0 on rank 0; 2.9.0 on rank 1"),
        ({"versions": {**VERSIONS, "thinwire": "0.2"}}, "versions", "failure", "0.2 on rank 1"),
        ({"versions": {**VERSIONS, "python": "3.12.1"}}, "versions", "failure", "3.12.1 on rank 1"),
        ({"versions": {**VERSIONS, "python": "3.11.9"}}, "versions", "ok", "torch 2.11.0"),
        ({"name_addresses": ["127.0.1.1"]}, "host name", "warning", "b is 127.0.1.1 on rank 1"),
        ({"name_addresses": []}, "host name", "note", "unknown on rank 1"),
        ({"address": "8.8.8.8"}, "public addresses", "warning", "8.8.8.8"),
        ({"address": None, "interface": "eth7"}, "addresses", "failure", "None (eth7) on rank 1"),
        ({"local_ranks": 8}, "cores", "warning", "4 for 8 ranks"),
        ({"hosts_error": "not allowed here"}, "hosts on one machine", "note", "machine of rank 1: not allowed here"),
        ({"memory_bytes": 10**8}, "memory", "warning", "100 MB free on node 1"),
        ({"folder_bytes": 10**8}, "disk", "warning", "100 MB free"),
        ({"folder_is_writable": False}, "folder for results", "failure", "/tmp"),
        ({"open_files": 64}, "open files", "failure", "64 at most on rank 1"),
        ({"device": "H200"}, "backend", "note", "gloo"),
    ],
)  # fmt: skip
def test_a_machine_that_is_not_like_the_other(changes: dict[str, Any], title: str, level: str, words: str) -> None:
    one = found_in(pair(**changes), title)
    assert one.level == level
    assert words in one.value
    assert level == "ok" or (one.meaning and one.advice)


def test_on_one_machine_a_loopback_name_is_only_a_note() -> None:
    assert machine.host_name([facts(name_addresses=["127.0.1.1"])] * 2).level == "note"


@pytest.mark.parametrize(("address", "level"), [("10.0.0.1", "note"), ("8.8.8.8", "warning")])
def test_a_store_that_listens_everywhere_is_told(address: str, level: str) -> None:
    machines = [facts(store_listens_at=["::"], addresses={address: "eth0"}), facts()]
    assert machine.listeners(machines, TWO).level == level


def test_listening_sockets_are_found_as_the_system_lists_them() -> None:
    with socket.create_server(("", 0)) as server:
        assert listening_addresses(server.getsockname()[1]) == ["0.0.0.0"]
    assert listening_addresses(1) == []


# ---- links


def test_an_asymmetric_pair_is_named_with_its_slow_direction() -> None:
    slow, fast = PairLink(10.0, 1.0), PairLink(90.0, 1.0)
    found = measured(links=[[None, fast], [slow, None]], ring=slow)
    (one,) = wire.asymmetric(found)
    assert (one.level, one.value) == ("warning", "rank 1 → rank 0 10 Mbit/s, back 90 Mbit/s")
    assert wire.asymmetric(measured(links=[[None, None], [slow, None]])) == [], "one of them was not measured"


def test_links_clocks_and_computing_that_are_not_as_they_should_be() -> None:
    assert wire_levels(ring=PairLink(100.0, 1.0))["rate"] == "note"
    assert wire_levels(ring=PairLink(20_000.0, 50.0))["latency"] == "note"
    assert wire_levels(retransmitted=[0, 50])["lost segments"] == "warning"
    assert wire_levels(clocks=[0.0, -3.0])["clocks"] == "note"
    assert wire_levels(clocks=[0.0, 90.0])["clocks"] == "warning"
    assert wire_levels(compute=[100.0, 30.0])["compute"] == "warning"
    assert "rank 1 is the slowest" in wire.compute(measured(compute=[100.0, 30.0])).value


def test_a_sample_and_links_without_time_are_told() -> None:
    many = measured(firsts=[*range(20)], links=[[None, None], [PairLink(9.0, 1.0), None]])
    (one,) = wire.rates(many)
    assert "2 of 20 nodes were measured; for 1 of 2 links there was no time left" in one.value
    assert announcement(range(20)).startswith("measuring 56 links between 8 of 20 nodes, then the ring: about 14 s")


def test_a_link_that_could_not_be_made_is_a_failure() -> None:
    assert wire.shaped(LinkReport(state="not shaped"), "1gbit")[0].level == "failure"
    assert wire.shaped(LinkReport(True, "off", 400.0, 0.1), "1gbit")[0].level == "warning"
    assert wire.shaped(LinkReport(True, "shaped", 999.0, 0.1), "1gbit") == []


def test_a_world_of_threads_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = tw.simulate(lambda comm: (measure_world(comm, torch.device("cpu")), comm.ledger.rows()), ranks=2)
    assert found[0][0] == found[1][0]
    assert {row["purpose"] for _, rows in found for row in rows} == {"start"}
    assert capsys.readouterr().err.startswith("measuring 2 links between 2 ranks, then the ring")


# ---- ports


def test_ports_that_refuse_or_drop_are_found_within_a_bound() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as shut:
        shut.bind(("127.0.0.1", 0))  # bound, but not listening
        fillers = [socket.socket() for _ in range(4)]
        for one in fillers:
            one.setblocking(False)
            one.connect_ex(full.getsockname())  # a queue that is full drops what comes, as a firewall does
        reasons = try_connections({1: full.getsockname(), 2: shut.getsockname()}, seconds=0.5)
        for one in fillers:
            one.close()
    assert reasons == {1: "no answer within 0.5 s", 2: "refused"}


def on_store(ranks: int, function: Any) -> list[Any]:
    """function(store, rank) on threads that share a store."""
    store, results = dist.HashStore(), [None] * ranks

    def run(rank: int) -> None:
        results[rank] = function(store, rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    return results


def test_ranks_that_reach_each_other_and_one_that_cannot_listen() -> None:
    addresses = ["127.0.0.1", "127.0.0.2", "192.0.2.9"]  # the last is no address of this machine
    found = on_store(3, lambda store, rank: find_unreached(store, rank, 3, addresses[rank], [0, 1, 2], seconds=0.3))
    assert found[0] == found[1] == found[2]
    assert {(one.source, one.to, one.address) for one in found[0]} == {(0, 2, "192.0.2.9"), (1, 2, "192.0.2.9")}
    finding = wire.reach_finding(found[0], num_nodes=3)
    assert finding.level == "failure"
    assert "rank 0 → rank 2 at 192.0.2.9 port 0" in finding.value


def test_facts_pass_through_the_store() -> None:
    found = on_store(2, lambda store, rank: gather_through(store, "facts", rank, 2, {"rank": rank}))
    assert found == [[{"rank": 0}, {"rank": 1}]] * 2


# ---- the result


def test_json_has_the_keys_that_are_promised_and_a_failure_is_shown() -> None:
    broken = pair(versions={**VERSIONS, "torch": "2.9.0"})
    blocked = wire.reach_finding([Unreached(0, 1, "10.0.0.2", 4321, "no answer within 4 s")], 2)
    findings = [*machine.machine_findings(broken, TWO), blocked, not_measured()]
    bad, good = Diagnosis("srun", broken, findings), Diagnosis("srun", pair(), [], measured())
    for one in (bad, good):
        told = json.loads(json.dumps(one.to_json()))
        assert set(told) == KEYS
        assert (told["ranks"], told["nodes"], told["launcher"]) == (2, 2, "srun")
        for finding in told["findings"]:
            assert set(finding) == {"level", "title", "value", "meaning", "advice"}
    assert (bad.failed, bad.to_json()["ok"], bad.to_json()["links"]) == (True, False, None)
    assert good.to_json()["links"]["rate_mbit"] == [[None, 20_000.0], [20_000.0, None]]
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(diagnosis_table(bad), diagnosis_table(good))
    console.file.close()
    text = console.export_text()
    assert "a run would fail here: 2 failures" in text
    assert "rank 0 → rank 1 at 10.0.0.2 port 4321: no answer within 4 s" in text
    assert "20,000, 0.1" in text


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    config = RunConfig(out=tmp_path / "not" / "there")
    found = look(config, WORLD_OF_ONE, torch.device("cpu"), LinkReport(on_hosts=True))
    assert found.folder == str(tmp_path)
    assert (found.address, found.interface, found.hosts_error) == ("127.0.0.1", "lo", None)
    assert min(found.cores, found.threads, found.memory_bytes, found.folder_bytes) > 0
    assert alone(WORLD_OF_ONE)[0].value == "one rank alone"
    assert alone(TWO) == []


# ---- the command


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--link", "100mbit"], "--link is about several ranks, and there is one; try --ranks 4"),
        (["--ranks", "2", "--nodes", "3"], "3 nodes for 2 ranks; possible: 1 to 2"),
        (["--ranks", "2", "--link", "fast"], "link 'fast': expected a rate"),
        (["--ranks", "0"], "ranks=0 is not possible: should be greater than 0"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, monkeypatch, "doctor", *args)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = call(capsys, monkeypatch, "doctor", "--device", "cuda")
    assert (code, out) == (2, "")
    assert "--device cuda, but torch finds no GPU here; use --device cpu" in err


def test_alone_it_says_so_and_an_interface_that_is_not_there_ends_with_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, monkeypatch, "doctor", "--device", "cpu")
    assert code == 0, err
    assert "one rank alone" in out
    assert "a run can start here" in out
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    code, out, err = call(capsys, monkeypatch, "doctor", "--device", "cpu", "--json")
    assert code == 1, err
    assert json.loads(out)["ok"] is False
    assert (
        "there is no interface eth77"
        in next(one for one in json.loads(out)["findings"] if one["level"] == "failure")["meaning"]
    )


@pytest.mark.usefixtures("program_server")
def test_in_a_world_of_two_processes_rank_0_alone_prints() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    world = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [*programs.PYTHON, "-m", "thinwire", "doctor", "--json"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        (out, err), (nothing, _) = [one.communicate(timeout=60) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    assert [one.returncode for one in ranks] == [0, 0], err
    assert nothing == ""
    told = json.loads(out)
    assert set(told) == KEYS
    assert (told["ranks"], told["nodes"], told["launcher"]) == (2, 1, "torchrun")
    assert told["links"]["rate_mbit"][0][1] > 0
    assert err.startswith("measuring 2 links")


@pytest.mark.usefixtures("program_server")
def test_on_hosts_with_a_slow_link_the_link_is_found() -> None:
    try:
        with netlab.hosts(1):
            pass
    except netlab.NotAllowed as error:
        pytest.skip(str(error))
    found = []
    for _ in range(3):  # the machine that the tests run on is shared, and busy
        command = [*programs.PYTHON, *["-m", "thinwire", "doctor", "--ranks", "2", "--link", "50mbit", "--json"]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["launcher"], told["nodes"]) == ("thinwire", 2)
        links = told["links"]
        found.append([links["rate_mbit"][0][1], links["rate_mbit"][1][0], links["ring"]["rate_mbit"]])
        if all(abs(rate / 50 - 1) < 0.1 for rate in found[-1]) and 0 < links["latency_ms"][0][1] < 5:
            return
    raise AssertionError(found)
