"""A comparison on ranks that others started: the same results, also after a stop, and one rank speaks for all."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests import programs
from tests.comm.test_addresses import LAN, OWN
from tests.comm.test_store import free_port
from tests.launch.test_launch import session_members
from tests.run.test_worker import same_files
from thinwire.comm import reach
from thinwire.comm.world import World
from thinwire.compare import in_world
from thinwire.compare.comparison import WorldShape, open_comparison
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.launch import world_ranks
from thinwire.launch.failures import Failure, WorldLost, cause_of, first_of
from thinwire.run.network import LinkReport
from thinwire.run.records import RunFolder, read_rows

pytestmark = pytest.mark.usefixtures("program_server")

SPECS = ("data_parallel", "local_sgd(every=4)")
BRIEF = ("--epochs", "1", "--seeds", "1", "--baseline", "none")
COLUMNS = ("test_accuracy", "test_loss", "train_loss", "wire_bytes", "training_bytes")
TWO_NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # as a torchrun on each of two machines sets them


def environment() -> dict[str, str]:
    path = f"{programs.ROOT / 'src'}:{programs.ROOT}"
    short = tempfile.mkdtemp(prefix="machine-", dir=os.environ["TMPDIR"])  # paths of sockets may have 107 characters
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "TMPDIR": short}


def start_ranks(
    folders: Sequence[Path], *arguments: str, python: Sequence[str] = programs.PYTHON,
    own: dict[int, Any] | None = None, env: dict[str, str] | None = None,
) -> list[subprocess.Popen[str]]:  # fmt: skip
    """Rank by rank, the command on two nodes of one rank each; `own` has further arguments of some ranks.

    `env` has variables that differ from those of two nodes.
    """
    port = free_port("127.0.0.1")
    ranks = []
    for rank, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        world = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **TWO_NODES,
            **(env or {}),
        }
        ranks.append(
            subprocess.Popen(
                [*python, "-m", "thinwire", *arguments, *(own or {}).get(rank, ())], cwd=folder, text=True,
                env={**environment(), **world}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )  # fmt: skip
    return ranks


def ends(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank; none may leave a process behind."""
    try:
        found = [(rank.communicate(timeout=100), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [session_members(rank.pid) for rank in ranks] == [[]] * len(ranks)
    return [(code, out, err) for (out, err), code in found]


def read_until(rank: subprocess.Popen[str], text: str) -> None:
    assert rank.stderr is not None
    while text not in rank.stderr.readline():
        assert rank.poll() is None


def figures(folder: Path, place: str) -> list[list[float]]:
    return [[row[name] for name in COLUMNS] for row in read_rows(folder / "runs" / place / "metrics.jsonl")]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks that thinwire starts itself get."""
    folder = tmp_path_factory.mktemp("own")
    asked = ["compare", *SPECS, "--ranks", "2", *BRIEF[:-1], "alone", "--out", "cmp"]
    command = [*programs.PYTHON, "-m", "thinwire", *asked]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder / "cmp"


def test_torchrun_gets_the_results_of_thinwires_own_ranks(own: Path, tmp_path: Path) -> None:
    ranks = [*programs.PYTHON, "-m", "thinwire", "compare", *SPECS, *BRIEF[:-1], "alone", "--out", "cmp"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    env = environment()
    done = subprocess.run([*torchrun, *ranks], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    here = tmp_path / "cmp"
    for place in ("1-data_parallel/seed-0", "2-local_sgd/seed-0", "3-alone/seed-0"):
        assert figures(here, place) == figures(own, place)
        assert same_files(own / "runs" / place, here / "runs" / place)
    mine, its = (json.loads((folder / "results.json").read_text())["strategies"] for folder in (here, own))
    for name in ("value", "wire_bytes_per_rank", "wire_bytes_between", "training_bytes_per_rank"):
        assert [row[name] for row in mine] == [row[name] for row in its]
    assert done.stderr.count("run 1 of 3: data_parallel, seed 0") == 1, "one rank speaks"
    assert "all ranks are on one node, with no network between them" in done.stdout
    assert "2 ranks on 1 node" in (here / "report.html").read_text()
    about = json.loads((here / "compare.json").read_text())
    assert about["world"] == {"launcher": "torchrun", "ranks_by_node": [2]}
    assert about["command"].startswith("torchrun --nproc-per-node 2 -m thinwire compare data_parallel ")


def test_a_comparison_that_was_killed_goes_on_where_machines_share_no_disk(own: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    slow = ("--task", "tests.user_task:noisy(fault='slow')")
    killed = start_ranks(folders, "compare", *SPECS, *slow, *BRIEF, "--out", "cmp", python=[sys.executable])
    read_until(killed[0], "run 2 of 2")
    for rank in killed:
        os.kill(rank.pid, signal.SIGKILL)  # not the processes that train: they end with it
    assert [code for code, _, _ in ends(killed)] == [-signal.SIGKILL] * 2
    first = folders[0] / "cmp" / "runs" / "1-data_parallel" / "seed-0" / "summary.json"
    before = first.stat().st_mtime_ns
    resumed = ends(start_ranks(folders, "compare", "--out", "cmp", "--resume"))
    assert [code for code, _, _ in resumed] == [0, 0], resumed
    (_, out, err), (_, *silent) = resumed
    assert silent == ["", ""]
    assert "run 2 of 2: local_sgd(every=4), seed 0" in err
    assert "run 1 of 2" not in err
    assert first.stat().st_mtime_ns == before
    measured = r"measured: [\d,.]+(–[\d,.]+)? Mbit/s, [\d.e-]+(–[\d.e-]+)? ms between 2 nodes"
    assert re.search(measured, err)
    assert re.search(measured, out)
    assert re.search(measured, (folders[0] / "cmp" / "report.html").read_text())
    rows = json.loads((folders[0] / "cmp" / "results.json").read_text())["strategies"]
    assert [row["seeds"] for row in rows] == [[0], [0]]
    assert [row["link_state"] for row in rows] == [["measured"]] * 2
    assert [set(row["link_measured"][0]) for row in rows] == [{"rate_mbit", "latency_ms"}] * 2
    assert [row["wire_bytes_between"]["mean"] > 0 for row in rows] == [True, True]
    assert not list(folders[1].rglob("summary.json")), "only rank 0 writes results"
    assert list(folders[1].rglob("rank-1*")), "each rank writes its own checkpoints"


def test_a_run_that_fails_on_one_rank_does_not_hold_up_the_others_and_is_done_again(tmp_path: Path) -> None:
    folders = [tmp_path / "shared"] * 2
    happened = tmp_path / "happened"
    task = ("--task", f"tests.user_task:noisy(fault='raise', rank=1, step=3, once={str(happened)!r})")
    failed = ends(start_ranks(folders, "compare", *SPECS, *task, *BRIEF, "--out", "cmp"))
    assert [code for code, _, _ in failed] == [1, 1]
    (_, out, err), (_, *silent) = failed
    assert silent == ["", ""]
    assert "1 of 2 runs failed:\n  data_parallel, seed 0: rank 1 failed: ZeroDivisionError: a fault of the user" in err
    assert re.search(r"data_parallel +failed", out)
    rows = json.loads((folders[0] / "cmp" / "results.json").read_text())["strategies"]
    assert [row["seeds"] for row in rows] == [[], [0]]
    happened.unlink()
    task = ("--task", f"tests.user_task:noisy(fault='kill', rank=1, step=3, once={str(happened)!r})")
    done = ends(start_ranks(folders, "compare", SPECS[0], *task, *BRIEF, "--restarts", "1", "--out", "again"))
    assert [code for code, _, _ in done] == [0, 0], done
    assert re.search(r"rank 1 \(process \d+\) was ended by SIGKILL; --resume goes on; restart 1 of 1", done[0][2])


def test_ctrl_c_ends_all_ranks_and_keeps_what_is_finished(tmp_path: Path) -> None:
    folders = [tmp_path / "shared"] * 2
    asked = (*SPECS, "--task", "tests.user_task:noisy(fault='slow')", *BRIEF, "--out", "cmp")
    ranks = start_ranks(folders, "compare", *asked, python=[sys.executable])
    read_until(ranks[0], "run 2 of 2")
    time.sleep(0.5)
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGINT)
    (code, _, err), other = ends(ranks)
    assert (code, other) == (130, (130, "", ""))
    assert "what is finished is kept. To go on: torchrun --nnodes 2 --nproc-per-node 1 -m thinwire compare" in err
    assert "Traceback" not in err
    rows = json.loads((folders[0] / "cmp" / "results.json").read_text())["strategies"]
    assert [row["seeds"] for row in rows] == [[0], []]


def test_an_interface_is_for_the_store_the_link_and_the_runs_and_may_differ_between_nodes(tmp_path: Path) -> None:
    asked = ("compare", SPECS[0], "--task", "synthetic", *BRIEF)
    lan = OWN[LAN[0]] if LAN else "lo"
    one_node = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": ""}
    met = ends(start_ranks([tmp_path] * 2, *asked, "--out", "one", "--iface", lan, env=one_node))
    assert [code for code, _, _ in met] == [0, 0], met
    nowhere = {"GLOO_SOCKET_IFNAME": "eth77"}  # what joins without --iface fails
    own = {0: ["--iface", "lo"], 1: ["--iface", lan]}
    two = ends(start_ranks([tmp_path] * 2, *asked, "--out", "two", own=own, env=nowhere))
    assert [code for code, _, _ in two] == [0, 0], two
    assert "measured: " in two[0][2]
    refused = ends(start_ranks([tmp_path] * 2, *asked, "--iface", "eth77"))
    assert [code for code, _, _ in refused] == [2, 2]
    assert all("--iface eth77: it is no interface on this machine" in err for _, _, err in refused)


@pytest.mark.parametrize(
    ("arguments", "own_arguments", "message"),
    [
        (["data_parallel", "--link", "10mbit"], {}, "--link is about ranks that thinwire starts on this machine, and"),
        (["data_paralel"], {}, "did you mean 'data_parallel'?"),
        (["data_parallel"], {1: ["--epochs", "3"]}, "ranks [1] were given other strategies or options than rank 0"),
    ],
)
def test_a_mistake_is_said_once_and_ends_all_ranks(
    arguments: list[str], own_arguments: dict[int, list[str]], message: str, tmp_path: Path
) -> None:
    one, other = ends(start_ranks([tmp_path] * 2, "compare", *arguments, own=own_arguments))
    assert message in one[2]
    assert [one[0], *other] == [2, 2, "", ""]
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"], "nothing was made"


# ---- without processes


def test_a_comparison_is_resumed_in_a_world_like_the_one_it_was_begun_in(tmp_path: Path) -> None:
    here = WorldShape(launcher="srun", ranks_by_node=[2, 2])
    options = {"out": tmp_path / "cmp", "epochs": 1}
    comparison = open_comparison(["data_parallel"], options, here)
    comparison.save()
    resume = {"out": tmp_path / "cmp", "resume": True}
    again = open_comparison([], resume, WorldShape(launcher="mpirun", ranks_by_node=[2, 2]))
    assert again.jobs == comparison.jobs
    assert again.resume_command.startswith("mpirun -n 4 thinwire compare --out ")
    go_on = r"srun -N 2 -n 4 thinwire compare --out .*cmp --resume"
    with pytest.raises(UsageError, match=f"4 ranks on 2 nodes, and there is no such world here; .* {go_on}"):
        open_comparison([], resume)
    with pytest.raises(UsageError, match=f"and torchrun started 2 ranks on 1 node; .* {go_on}"):
        open_comparison([], resume, WorldShape(launcher="torchrun", ranks_by_node=[2]))
    open_comparison(["data_parallel"], {"out": tmp_path / "own", "ranks": 2}).save()
    with pytest.raises(UsageError, match="thinwire starts itself, not srun; go on with it: thinwire compare --out"):
        open_comparison([], {"out": tmp_path / "own", "resume": True}, here)


def test_the_baseline_needs_as_many_ranks_on_every_node(tmp_path: Path) -> None:
    uneven = WorldShape(launcher="torchrun", ranks_by_node=[2, 1])
    assert "--nproc-per-node … -m" in uneven.command
    options = {"out": tmp_path / "cmp"}
    decision = open_comparison(["data_parallel"], options, uneven).baseline
    assert decision is not None
    assert not decision.run
    with pytest.raises(UsageError, match="and these have 2, 1; start as many on each"):
        open_comparison(["data_parallel"], {**options, "baseline": "alone"}, uneven)


class OfTwo(world_ranks.WorldRanks):
    """A rank of two, with a store in this process."""

    def __init__(self, store: dist.Store, rank: int = 0) -> None:
        self.world = World(rank, 2, 0, 1, "127.0.0.1", 0, "torchrun")
        self.store, self.address, self.port = store, "127.0.0.1", 0
        self.num_orders = self.num_gathers = 0


def test_a_rank_of_the_world_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_ranks, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(reach, "LEAVE_SECONDS", 0.05)
    ranks = OfTwo(dist.HashStore())
    with pytest.raises(WorldLost, match="rank 1 has not answered"):
        ranks.gather("here")
    ranks.leave("stopped by SIGTERM")
    with pytest.raises(WorldLost, match="rank 0 left: stopped by SIGTERM"):
        ranks.gather("here")


def end_late_on_rank_0(payload: dict[str, Any]) -> None:
    """A rank's process: that of rank 0 ends after the other, as when it writes a large model."""
    time.sleep(2.0 if payload["rank"] == 0 else 0.0)
    Path(payload["outcome"]).write_text('{"result": null}')


def test_ranks_wait_for_one_whose_process_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_ranks, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(world_ranks, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(world_ranks, "rank_process", end_late_on_rank_0)
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forked)
    store = dist.HashStore()
    order = {"program": "sleep", "config": {}, "link": []}

    def perform(rank: int) -> list[dict[str, Any]]:
        time.sleep(0.5 * rank)  # one after the other: a fork copies what is open, also the other process's sentinel
        return OfTwo(store, rank)._perform(order, None)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(perform, range(2))) == [[{"result": None}] * 2] * 2


def test_the_link_is_measured_if_the_baseline_may_still_run(tmp_path: Path) -> None:
    shape = WorldShape(launcher="srun", ranks_by_node=[1, 1])
    comparison = open_comparison(["data_parallel"], {"out": tmp_path / "cmp", "seeds": 1}, shape)
    RunFolder(tmp_path / "cmp" / comparison.jobs[0].place).save_summary({})
    assert comparison.baseline is None
    asked: list[str] = []

    class Ranks:
        nodes = (0, 1)

        def run(self, config: RunConfig, link: LinkReport, file: Path | None, program: str = "train") -> Any:
            asked.append(f"{program} {link.state}")
            return [False, "measured", 90.0, 0.3]

    with in_world._ranks(cast(world_ranks.WorldRanks, Ranks()), comparison) as start:
        start(comparison.config, tmp_path)
    assert asked == ["measure_link None", "train measured"]


def test_the_interface_may_change_with_a_resume_and_is_in_its_command(tmp_path: Path) -> None:
    here = WorldShape(launcher="srun", ranks_by_node=[2, 2])
    comparison = open_comparison(["data_parallel"], {"out": tmp_path / "cmp", "iface": "lo"}, here)
    assert comparison.resume_command.endswith(" --resume --iface lo")
    comparison.save()
    again = {"out": tmp_path / "cmp", "resume": True}
    assert open_comparison([], in_world._restarted(again), here).config.iface == "auto", "ranks have met by this one"
    assert open_comparison([], {**again, "iface": "wire"}, here).config.iface == "wire"


def test_the_first_cause_is_not_the_rank_that_lost_another() -> None:
    lost, wrong = Failure(0, "PeerLost", "lost contact"), Failure(1, "ValueError", "wrong", "Traceback: here")
    assert first_of([lost, wrong]) == wrong
    assert first_of([lost]) == lost
    assert first_of([]) is None
    assert str(cause_of(wrong)) == "rank 1 failed: ValueError: wrong\nTraceback: here"
    assert str(cause_of(Failure(1, "", "was ended"))) == "rank 1 was ended"
    assert isinstance(cause_of(Failure(0, "UsageError", "no")), UsageError)
