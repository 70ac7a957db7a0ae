"""`thinwire train --elastic`: ranks are processes, which are stopped, killed, started and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.programs import PYTHON
from thinwire.cli import main
from thinwire.elastic.keeper import find_place, find_store
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes, client
from thinwire.elastic.record import Record
from thinwire.errors import UsageError


class Ranks:
    """Ranks of one run, as a user starts them."""

    def __init__(self, folder: Path, *settings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.place, self.folder, self.settings = f"127.0.0.1:{self.port}", folder, settings
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *more: str) -> None:
        out = str(self.folder / name)
        command = ["-m", "thinwire", "train", "--elastic", self.place, *self.settings, "--out", out, *more]
        self.processes[name] = subprocess.Popen(
            [*PYTHON, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def rows(self, name: str) -> int:
        return len(Record.read(self.folder / name / "membership.jsonl").rows)

    def ended(self, name: str) -> tuple[int, str]:
        out, _ = self.processes[name].communicate(timeout=150)
        return self.processes[name].returncode, out

    def notes(self) -> Notes:
        return Notes(lambda: client("127.0.0.1", self.port), self.place)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


def wait_for(holds: Callable[[], bool], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("program_server")
def test_ranks_stop_join_and_are_killed_and_the_record_repeats_the_run(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "--strategy", "diloco(every=4)", "--epochs", "4", "--patience", "20s")
    try:
        for name in "ab":
            ranks.start(name, "--min-ranks", "2")
        wait_for(lambda: ranks.rows("a") >= 2)
        notes = ranks.notes()
        pids = [notes.read(f"member/{i}")["pid"] for i in range(2)]
        os.kill(pids[0], signal.SIGSTOP)  # the others wait, so the run cannot end before the third rank is there
        ranks.start("c")
        wait_for(lambda: len(notes.entries("lobby")) == 3)
        os.kill(pids[0], signal.SIGCONT)
        wait_for(lambda: ranks.rows("c") > 0)
        os.kill(pids[0], signal.SIGKILL)
        ends = {name: ranks.ended(name) for name in "abc"}
    finally:
        ranks.kill()
    left = [name for name in "abc" if ends[name][0] == 0]
    assert len(left) == 2, ends
    assert "c" in left
    records = [Record.read(tmp_path / name / "membership.jsonl").rows for name in left]
    assert records[0] == records[1]
    assert [row.joined for row in records[0] if row.joined] == [[2]]
    assert [one for row in records[0] for one in row.lost] == ["0"]
    rest = ends[next(name for name in left if name != "c")][1]
    assert "joins; 3 ranks go on" in rest
    assert "round 0: 2 ranks train; rank 0 prints epochs\n" in rest
    joined = records[0][[bool(row.joined) for row in records[0]].index(True)].round
    assert f"round {joined}: rank 2 has joined; 3 ranks train; rank 0 prints epochs\n" in ends["c"][1]
    assert "rank 0" in rest
    assert "has left (silent for" in rest
    summary = json.loads((tmp_path / "c" / "summary.json").read_text())
    assert summary["test_accuracy"] > 80
    assert {row["purpose"] for row in summary["sent_by_this_rank"]} == {"start", "train"}
    again = subprocess.run(
        [*PYTHON, "-m", "thinwire", "replay", str(tmp_path / "c")], capture_output=True, text=True, timeout=100
    )
    assert again.returncode == 0, again.stderr
    assert "bit for bit the same again" in again.stdout


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("program_server")
def test_a_rank_that_was_given_up_comes_again_and_one_that_is_stopped_says_so(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "--strategy", "diloco(every=4)", "--epochs", "1000", "--patience", "4s")
    try:
        for name in "ab":
            ranks.start(name, "--min-ranks", "2")
        wait_for(lambda: ranks.rows("a") >= 2)
        notes = ranks.notes()
        other = notes.read("member/1")["pid"]
        os.kill(other, signal.SIGSTOP)
        wait_for(lambda: any(one["lost"] for one in decisions(notes)))
        os.kill(other, signal.SIGCONT)
        wait_for(lambda: len(notes.entries("lobby")) == 3)
        wait_for(lambda: any(2 in one["members"] for one in decisions(notes)))
        os.kill(other, signal.SIGINT)
        wait_for(lambda: any(one["lost"].get("2") == "stopped by SIGINT" for one in decisions(notes)))
        os.kill(notes.read("member/0")["pid"], signal.SIGTERM)
        ends = {name: ranks.ended(name) for name in "ab"}
        notes.write("finished")  # nobody goes on: the store's process may end
    finally:
        ranks.kill()
    assert sorted(code for code, _ in ends.values()) == [130, 130], ends
    text = ends["a"][1] + ends["b"][1]
    assert "the others went on without rank 1 (silent for" in text
    assert "it comes again as a new rank" in text
    for name in ("SIGINT", "SIGTERM"):
        assert f"stopped by {name}: telling the other ranks; no new checkpoint is written\n" in text
        assert f"thinwire: stopped by {name}. To go on from the last checkpoint, on each machine: thinwire" in text


def decisions(notes: Notes) -> list[dict[str, Any]]:
    """All decisions that were made."""
    newest = Membership.newest(SimpleNamespace(notes=notes))  # type: ignore[arg-type]
    return [notes.read(f"decision/{i}") for i in range(0 if newest is None else newest.number + 1)]


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("program_server")
def test_a_run_whose_ranks_have_all_gone_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Its store is behind a gate, which a rank without the secret does not pass."""
    secret = tmp_path / "secret.txt"
    secret.write_text("correct horse battery staple")
    secret.chmod(0o600)
    ranks = Ranks(
        tmp_path, "--strategy", "local_sgd(every=2)", "--epochs", "3", "--patience", "2s", "--secret-file", str(secret)
    )
    try:
        ranks.start("a")
        wait_for(lambda: ranks.rows("a") >= 2)
        with pytest.raises(UsageError, match="asks for a secret"):
            find_store(ranks.place)
        ranks.kill()
        done = ranks.rows("a")
        ranks.start("a", "--resume")
        code, text = ranks.ended("a")
    finally:
        ranks.kill()
    assert code == 0, text
    rows = Record.read(tmp_path / "a" / "membership.jsonl").rows
    assert [row.round for row in rows] == list(range(len(rows)))
    assert len(rows) > done
    assert rows[-1].epoch == 2
    assert not any(row.lost or row.joined for row in rows)
    assert re.search(r"epoch 3: accuracy \d+\.\d\d %, loss \d\.\d{4} \(1 rank\)\n", text), text
    assert re.search(r"\d %, loss \d\.\d{4} after \d+ rounds; 0 samples lost with .*; sent 0 B by this rank; ", text)


@pytest.mark.usefixtures("program_server")
def test_whom_the_store_refuses_the_rank_that_opened_it_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process of the store has no standard error of its own, because it may outlive the rank."""
    secret, said = tmp_path / "secret.txt", []
    secret.touch(mode=0o600)
    secret.write_text("correct horse battery staple")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def has_said(text: str) -> bool:
        said.append(capsys.readouterr().err)
        return text in "".join(said)

    def knock(count: int) -> None:
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")

    found = find_store(f"127.0.0.1:{port}", secret, "lo")
    try:
        knock(1)
        wait_for(lambda: has_said(f"refused a connection from 127.0.0.1 to 127.0.0.1:{port}: "), 20)
        knock(9)
        wait_for(lambda: has_said("(10 attempts so far)"), 20)
    finally:
        found.notes.write("finished")
        found.close(is_finished=True)
    assert found.keeper is not None
    assert "correct horse" not in "".join(said)


def test_the_store_listens_at_the_interface_that_was_asked_for_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    known, opened = {"127.0.0.1": "lo", "10.0.0.7": "eth0", "10.8.0.7": "wg0"}, []
    for module in ("thinwire.elastic.keeper", "thinwire.comm.addresses"):
        monkeypatch.setattr(f"{module}.own_addresses", lambda: known)

    def open_store(address: str, port: int, secret_file: Path | None) -> None:
        opened.append(address)
        raise UsageError("as far as this test goes")

    monkeypatch.setattr("thinwire.elastic.keeper._open", open_store)
    names = {"node7": ("127.0.0.1", "10.0.0.7", "10.8.0.7")}
    monkeypatch.setattr("thinwire.elastic.keeper.resolve_host", lambda host: names.get(host, (host,)))
    other = r"--iface wg0 has 10.8.0.7, but the store of --elastic 10.0.0.7:29400 listens at 10.0.0.7 \(eth0\); give"
    with pytest.raises(UsageError, match=f"{other} --elastic 10.8.0.7:29400 on every rank"):
        find_store("10.0.0.7:29400", iface="wg0")
    with pytest.raises(UsageError, match="--iface eth77: it is no interface"):
        find_store("192.0.2.7:29400", iface="eth77")
    assert opened == [], "refused before anything listens"
    for place, iface in (("10.8.0.7", "wg0"), ("node7", "wg0"), ("node7", "auto")):
        with pytest.raises(UsageError, match="as far as"):
            find_store(f"{place}:29400", iface=iface)
    assert opened == ["10.8.0.7", "10.8.0.7", "127.0.0.1"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "data_parallel"], "elastic: data_parallel cannot go on when a rank leaves"),
        (["--ranks", "2", "--steps", "9"], "--elastic does not go with --ranks, --steps: each command is one rank"),
        (["--test-every", "5steps"], "--test-every 5steps: with --elastic a step has no fixed size"),
        (["--strategy", "diloco(fragments=2)"], "possible: fragments=1 and wait=0"),
        (["--elastic", "here"], "--elastic 'here' is no HOST:PORT; give an address of one machine"),
    ],
)
def test_what_an_elastic_run_cannot_have_is_refused(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [] if "--elastic" in more else ["--elastic", "127.0.0.1:9"]
    strategy = [] if "--strategy" in more else ["--strategy", "diloco"]
    monkeypatch.setattr(sys, "argv", ["thinwire", "train", *place, *strategy, "--out", str(tmp_path / "run"), *more])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["10.0.0.1", "host:", ":80", "host:0", "host:99999", "host:x", ""])
def test_a_place_is_a_host_and_a_port(text: str) -> None:
    assert find_place("host:29400") == ("host", 29400)
    with pytest.raises(UsageError, match="is no HOST:PORT"):
        find_place(text)
