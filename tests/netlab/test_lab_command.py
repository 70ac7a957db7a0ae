"""thinwire lab: a command of the user's own on hosts with a link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thinwire import netlab
from thinwire.errors import UsageError
from thinwire.launch import lab


def run(*command: str) -> int:
    try:
        return lab.run_in_lab(command, 2, "50mbit")
    except netlab.NotAllowed as error:
        pytest.skip(str(error))


def test_each_host_runs_the_command_in_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR, $PET_NODE_RANK of $PET_NNODES") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["0 of 2 at 10.77.0.1, 0 of 2", "1 of 2 at 10.77.0.1, 1 of 2"]
    assert "2 hosts with a link of 50mbit each; measured 4" in err
    assert "sent between hosts, as the Linux kernel counts: " in err


@pytest.mark.parametrize("link", ["1gbit", "10mbit", "20mbit,20ms"])
def test_what_the_measurement_sends_is_not_counted(link: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its last packets are still in queues when it ends."""
    try:
        assert lab.run_in_lab(["sleep", "0.5"], 2, link) == 0
    except netlab.NotAllowed as error:
        pytest.skip(str(error))
    said = re.search(r"as the Linux kernel counts: ([\d.]+) (\w+) ", capfd.readouterr().err)
    assert said is not None
    assert float(said[1]) * {"B": 1, "kB": 1e3, "MB": 1e6}[said[2]] < 5_000


def test_if_one_host_fails_the_others_are_ended_and_its_code_is_returned(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "GRACE_SECONDS", 0.2)
    assert run("sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 50; echo late") == 7
    assert "late" not in capfd.readouterr().out


def test_what_a_command_started_and_did_not_wait_for_is_ended(tmp_path: Path) -> None:
    """As the ranks of a torchrun that was killed."""
    script = (
        f"sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/$RANK; exec sleep 50' & until [ -s {tmp_path}/$RANK ]; do :; done"
    )
    assert run("sh", "-c", f"{script}; exit 3") == 3
    started = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(started) == 2
    assert not [
        pid for pid in started if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.parametrize(
    ("command", "nodes", "message"),
    [([], 2, "no command; try: thinwire lab"), (["true"], 1, "--nodes 1; possible: 2 or more")],
)
def test_mistakes_are_named(command: list[str], nodes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lab.run_in_lab(command, nodes, "50mbit")
