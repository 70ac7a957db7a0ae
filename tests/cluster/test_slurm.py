"""thinwire under a real Slurm: srun on one and two nodes, jobs that are killed, cancelled and queued again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm import ROOT, Slurm, slurm, why_not
from tests.run.test_worker import same_files, timeless
from thinwire import netlab

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
TWO_RANKS = ("--nodes", "2", "--ntasks-per-node", "1")
TASK = "tests.user_task:noisy(fault='slow')"  # random noise and dropout; 50 ms a step, so that there is time to disturb
SETTINGS = ("--task", TASK, "--epochs", "3", "--checkpoint-every", "4", "--seed", "5")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    try:
        with slurm() as started:
            yield started
    except netlab.NotAllowed as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def undisturbed(cluster: Slurm) -> Path:
    """The run of a job that nothing happened to."""
    out = cluster.folder / "undisturbed"
    job = cluster.submit(SCRIPT, *TWO_RANKS, "--", *SETTINGS, OUT=str(out))
    ended = cluster.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), log(cluster, job)
    return out


def log(cluster: Slurm, job: str) -> str:
    return (cluster.folder / f"thinwire-{job}.log").read_text()


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2), (2, 3)])
def test_srun_trains_on_one_node_on_two_and_on_two_with_unequal_ranks(
    cluster: Slurm, nodes: int, ranks: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train = ("thinwire", "train", "--task", "digits", "--epochs", "1", "--out", str(out))
    done = cluster.run("srun", "-N", str(nodes), "-n", str(ranks), *train)
    assert done.returncode == 0, done.stderr
    assert f"digits · data_parallel · {ranks} ranks" in done.stdout
    found = summary(out)
    assert (found["ranks"], found["nodes"]) == (ranks, nodes)
    assert (found["wire_bytes_by_link"]["between"] > 0) == (nodes > 1)


def test_a_run_on_two_nodes_ends_as_one_on_this_machine(cluster: Slurm, undisturbed: Path) -> None:
    out = cluster.folder / "here"
    done = cluster.run("thinwire", "train", "--ranks", "2", *SETTINGS, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert same_files(undisturbed, out)


def test_the_doctor_finds_nothing_wrong_and_counts_each_nodes_ranks(cluster: Slurm) -> None:
    done = cluster.run("srun", "-N", "2", "-n", "3", "thinwire", "doctor", "--iface", "wire", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["launcher"], told["ranks"], told["nodes"]) == ("srun", 3, 2)
    found = [(one["host"], one["local_ranks"], one["interface"]) for one in told["machines"]]
    assert found == [("n1", 2, "wire"), ("n1", 2, "wire"), ("n2", 1, "wire")]


def test_an_interface_that_is_on_no_node_is_named_once_a_node(cluster: Slurm) -> None:
    done = cluster.run("srun", "-N", "2", "-n", "4", "thinwire", "train", "--iface", "eth77", "--epochs", "1")
    assert done.returncode == 2
    for node in ("n1", "n2"):
        assert done.stderr.count(f"--iface eth77: it is no interface on this machine ({node})") == 1
    assert "wire (10.77.0.1)" in done.stderr


def kill_a_rank(cluster: Slurm, job: str) -> None:
    rank = cluster.rank_of(job, 1)
    assert rank is not None
    os.kill(rank, signal.SIGKILL)


def requeue(cluster: Slurm, job: str) -> None:
    assert cluster.run("scontrol", "requeue", job).returncode == 0


def signal_the_time(cluster: Slurm, job: str) -> None:
    """What Slurm does five minutes before the time limit of the example."""
    assert cluster.run("scancel", "--batch", "--signal", "USR1", job).returncode == 0


@pytest.mark.parametrize(
    ("disturb", "told"),
    [(kill_a_rank, "thinwire ended with code 137"), (requeue, ""), (signal_the_time, "the time is nearly up")],
)
def test_a_job_that_is_queued_again_ends_bit_for_bit_the_same(
    cluster: Slurm, undisturbed: Path, disturb: Any, told: str
) -> None:
    out = cluster.folder / disturb.__name__
    job = cluster.submit(SCRIPT, *TWO_RANKS, "--", *SETTINGS, OUT=str(out))
    cluster.wait_for(lambda: any(out.glob("checkpoints/*/rank-1.json")), "a checkpoint")
    disturb(cluster, job)
    cluster.wait_for(lambda: cluster.job(job)["Restarts"] == "1", "the job's second start")
    assert cluster.wait_for_end(job)["JobState"] == "COMPLETED", log(cluster, job)
    assert told in log(cluster, job)
    assert "resuming at step" in log(cluster, job)
    check_equal(undisturbed, out)


def test_a_cancelled_job_that_is_submitted_again_ends_bit_for_bit_the_same(cluster: Slurm, undisturbed: Path) -> None:
    out = cluster.folder / "cancelled"
    first = cluster.submit(SCRIPT, *TWO_RANKS, "--", *SETTINGS, OUT=str(out))
    cluster.wait_for(lambda: any(out.glob("checkpoints/*/rank-1.json")), "a checkpoint")
    assert cluster.run("scancel", first).returncode == 0
    ended = cluster.wait_for_end(first)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), log(cluster, first)
    assert not (out / "summary.json").exists()
    second = cluster.submit(SCRIPT, *TWO_RANKS, "--", *SETTINGS, OUT=str(out))
    assert cluster.wait_for_end(second)["JobState"] == "COMPLETED", log(cluster, second)
    assert "resuming at step" in log(cluster, second)
    check_equal(undisturbed, out)


def check_equal(undisturbed: Path, out: Path) -> None:
    assert same_files(undisturbed, out)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert timeless(undisturbed, name) == timeless(out, name)


@pytest.mark.parametrize(
    ("arguments", "restarts", "code"), [(("--strategy", "nonsense"), "3", "2:0"), (("--lr", "1e30"), "0", "1:0")]
)
def test_a_mistake_is_not_tried_again_nor_is_a_failure_more_often_than_asked(
    cluster: Slurm, arguments: tuple[str, ...], restarts: str, code: str
) -> None:
    job = cluster.submit(SCRIPT, *TWO_RANKS, "--", *arguments, OUT=str(cluster.folder / "never"), RESTARTS=restarts)
    ended = cluster.wait_for_end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", code, "0"), log(cluster, job)
