"""The example for machines of the user's own, on hosts of netlab: the same command on each, with unequal ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT
from tests.run.test_worker import same_files
from thinwire import netlab
from thinwire.netlab import Lab

SCRIPT = str(ROOT / "examples" / "two_hosts" / "train.sh")
SETTINGS = ("--task", "digits", "--epochs", "2", "--seed", "5")
PATHS = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    try:
        with netlab.hosts(2, "1gbit") as made:
            yield made
    except netlab.NotAllowed as error:
        pytest.skip(str(error))


def run(lab: Lab, out: Path, ranks: tuple[str, str], **more: str) -> list[tuple[int, str]]:
    """The same command on both hosts; exit code and output of each."""
    env = {**os.environ, **PATHS, "HOSTS": " ".join(host.address for host in lab), "IFACE": "wire", "OUT": str(out)}
    started = [
        host.start(
            [SCRIPT, *SETTINGS], env={**env, "RANKS": number, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for host, number in zip(lab, ranks, strict=True)
    ]  # fmt: skip
    try:
        outputs = [one.communicate(timeout=400)[0] for one in started]
    finally:
        for one in started:
            one.terminate()  # torchrun then ends its ranks
            one.wait(60)
    return [(one.returncode, output) for one, output in zip(started, outputs, strict=True)]


def test_hosts_with_one_and_two_ranks_train_together_and_end_as_three_ranks_here(lab: Lab, tmp_path: Path) -> None:
    first, second = run(lab, tmp_path / "hosts", ("1", "2"))
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert "digits · data_parallel · 3 ranks" in first[1]
    summary = json.loads((tmp_path / "hosts" / "summary.json").read_text())
    assert (summary["ranks"], summary["nodes"]) == (3, 2)
    here = [sys.executable, "-m", "thinwire", "train", "--ranks", "3", *SETTINGS, "--out", str(tmp_path / "here")]
    subprocess.run(here, env={**os.environ, **PATHS}, check=True, timeout=400)
    assert same_files(tmp_path / "hosts", tmp_path / "here")


def test_a_machine_that_is_not_in_the_list_says_so(lab: Lab, tmp_path: Path) -> None:
    for code, output in run(lab, tmp_path / "run", ("1", "1"), HOSTS="10.77.9.1 10.77.9.2"):
        assert code == 2
        assert "none of HOSTS (10.77.9.1 10.77.9.2) is an address of wire on this machine, which has 10.77.0." in output
