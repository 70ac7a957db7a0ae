"""Comparisons: honest, repeatable, kept when interrupted, and clear about what went wrong."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.compare.browser import check_in_browser
from tests.run.test_worker import same_files
from thinwire.run.records import read_rows

ROOT = Path(__file__).parent.parent.parent
SPECS = ("data_parallel", "data_parallel(bucket_mb=0.05)")
NO_BASELINE = ("--baseline", "none")  # auto goes by the time that runs take
SETTINGS = ("--ranks", "2", "--link", "200mbit", "--epochs", "2", "--seeds", "2", "--target", "80", *NO_BASELINE)


pytestmark = pytest.mark.usefixtures("program_server")


def start(
    *arguments: str, folder: Path, python: Sequence[str] = (sys.executable,), **more: str
) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "200", "TMPDIR": str(folder), **more}
    return subprocess.Popen(
        [*python, "-m", "thinwire", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=env, cwd=folder, start_new_session=True,
    )  # fmt: skip


def thinwire(
    *arguments: str, folder: Path, expect: int = 0, python: Sequence[str] = programs.PYTHON
) -> tuple[str, str]:
    process = start(*arguments, folder=folder, python=python)
    out, err = process.communicate(timeout=110)
    assert process.returncode == expect, err
    return out, err


def results_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="session")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same comparison, made twice, with what they printed; by one of the test processes, for all of them."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "twice"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, python in (("one", programs.PYTHON), ("two", [sys.executable])):
            if not (folder / f"{name}.err").exists():
                out, err = thinwire("compare", *SPECS, *SETTINGS, "--out", name, folder=folder, python=python)
                (folder / f"{name}.out").write_text(out)
                (folder / f"{name}.err").write_text(err)
    return folder


def test_two_comparisons_give_the_same_numbers(twice: Path) -> None:
    for place in (
        "1-data_parallel/seed-0",
        "1-data_parallel/seed-1",
        "2-data_parallel/seed-0",
        "2-data_parallel/seed-1",
    ):
        one, two = (twice / name / "runs" / place for name in ("one", "two"))
        assert same_files(one, two)
        columns = ("test_accuracy", "test_loss", "train_loss", "wire_bytes")
        rows = [[[row[c] for c in columns] for row in read_rows(folder / "metrics.jsonl")] for folder in (one, two)]
        assert rows[0] == rows[1]
    for one, two in zip(*(results_of(twice / name)["strategies"] for name in ("one", "two")), strict=True):
        assert one["value"] == two["value"]
        assert one["wire_bytes_per_rank"] == two["wire_bytes_per_rank"]
        kernel = [row["kernel_bytes_per_rank"]["mean"] for row in (one, two)]
        print(f"{one['strategy']}: kernel {kernel} B, {100 * (kernel[1] / kernel[0] - 1):+.4f} %")
        assert abs(kernel[0] / kernel[1] - 1) < 0.001


def test_strategies_start_alike_and_seeds_differ(twice: Path) -> None:
    """bucket_mb changes only what travels together, and on two ranks a sum has one order: the same numbers."""
    one, other = results_of(twice / "one")["strategies"]
    assert one["value"] == other["value"]
    assert one["value"]["values"][0] != one["value"]["values"][1]
    assert one["value"]["deviation"] > 0
    first, second = (read_rows(twice / "one" / "runs" / f"1-data_parallel/seed-{s}" / "metrics.jsonl") for s in (0, 1))
    assert first[0]["train_loss"] != second[0]["train_loss"]


def test_results_hold_every_figure_and_the_command_to_repeat_it(twice: Path) -> None:
    results = results_of(twice / "one")
    assert (results["task"], results["ranks"], results["nodes"], results["link"]) == ("digits", 2, 2, "200mbit")
    for row in results["strategies"]:
        assert all(state in ("shaped", "off") for state in row["link_state"])
        assert [set(measured) for measured in row["link_measured"]] == [{"rate_mbit", "latency_ms"}] * 2
    assert results["command"] == (
        "thinwire compare data_parallel 'data_parallel(bucket_mb=0.05)' --epochs 2 --ranks 2 --link 200mbit "
        "--seeds 2 --baseline none --target 80.0"
    )
    for row in results["strategies"]:
        assert row["seeds"] == [0, 1]
        assert row["errors"] == []
        spent = row["train_seconds"]["mean"]
        assert 0 < row["seconds_to_target"]["mean"] <= spent < row["seconds"]["mean"]
        for rate, seconds in zip(row["samples_per_second"]["values"], row["train_seconds"]["values"], strict=True):
            assert rate == pytest.approx(2 * 1436 / seconds, rel=0.002)
        assert 0 < row["waiting_share"]["mean"] < 1
        assert row["wire_bytes_inside"]["mean"] == 0
        assert abs(row["kernel_bytes_between"]["mean"] / row["wire_bytes_between"]["mean"] - 1) < 0.05
        assert row["peak_memory_bytes"]["mean"] > 1e8


def test_the_table_and_the_news(twice: Path) -> None:
    out, err = (twice / "one.out").read_text(), (twice / "one.err").read_text()
    for spec in SPECS:
        assert re.search(rf"^ {re.escape(spec)} +\d+\.\d\d ± \d\.\d\d % ", out, re.M), out
    narrow = ("accuracy", "training", "× data_parallel", "to 80", "sent in training", "waiting")
    for heading in (*narrow, "best", "sent in all", "kernel", "samples/s", "memory"):
        assert heading in out
    assert re.search(r"^data_parallel\(bucket_mb=0.05\): same accuracy within noise, .* data_parallel", out, re.M), out
    assert "sent: between nodes, by all ranks together" in out
    assert "link 200mbit, measured 1" in out
    assert "open one/report.html" in out
    assert "run 4 of 4: data_parallel(bucket_mb=0.05), seed 1" in err
    assert re.search(r"accuracy \d\d\.\d\d % in .*; about .* left", err)
    assert "epoch 1/2" not in err, "the runs themselves are quiet"


def test_the_timeline_of_a_few_steps(twice: Path) -> None:
    rows = read_rows(twice / "one" / "runs" / "2-data_parallel" / "seed-0" / "timeline.jsonl")
    for rank in (0, 1):
        spans = [row for row in rows if row["rank"] == rank]
        steps = [row for row in spans if row["kind"] == "step"]
        assert [row["step"] for row in steps] == [3, 4, 5, 6]
        ends = [row["begin"] + row["seconds"] for row in steps]
        assert all(end <= row["begin"] + 1e-4 for end, row in zip(ends, steps[1:], strict=False)), "one after the other"
        for step, end in zip(steps, ends, strict=True):
            inside = [row for row in spans if row["step"] == step["step"] and row["kind"] == "waiting"]
            assert inside
            assert all(
                step["begin"] - 1e-4 <= row["begin"] and row["begin"] + row["seconds"] <= end + 1e-4 for row in inside
            )
            sent = [row for row in spans if row["step"] == step["step"] and row["kind"] == "communication"]
            assert sum(row["bytes"] for row in sent) == 340_008, "all gradients of the model, in each step"
            assert len(sent) > 1, "in several buckets"


def test_the_report_of_a_real_comparison_in_a_browser(twice: Path) -> None:
    check_in_browser(twice / "one" / "report.html")


def test_a_report_is_made_from_the_folder_alone(twice: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(twice / "one", moved)
    (moved / "report.html").unlink()
    (moved / "results.json").unlink()
    out, _ = thinwire("report", "moved", folder=tmp_path)
    assert out.strip() == "moved/report.html"
    assert (moved / "report.html").read_text() == (twice / "one" / "report.html").read_text()
    run = moved / "runs" / "1-data_parallel" / "seed-1"
    thinwire("report", str(run), folder=tmp_path)
    assert "One strategy" in (run / "report.html").read_text()


# ---- what goes wrong


def test_one_failed_run_does_not_stop_the_others_and_is_done_again(tmp_path: Path) -> None:
    task = f"tests.user_task:noisy(fault='raise', step=3, once={str(tmp_path / 'happened')!r})"
    settings = ("--task", task, "--epochs", "1", "--seeds", "1", "--ranks", "2", "--out", "cmp", *NO_BASELINE)
    out, err = thinwire("compare", *SPECS, *settings, "--resume", folder=tmp_path, expect=1)
    assert err.count("no comparison in cmp yet: starting one") == 1
    assert "1 of 2 runs failed:\n  data_parallel, seed 0: rank" in err
    assert "a fault of the user's own" in err
    assert re.search(r"data_parallel +failed", out)
    page = (tmp_path / "cmp" / "report.html").read_text()
    assert "Runs that failed" in page
    rows = results_of(tmp_path / "cmp")["strategies"]
    assert [len(row["seeds"]) for row in rows] == [0, 1]
    done = tmp_path / "cmp" / "runs" / "2-data_parallel" / "seed-0" / "summary.json"
    before = done.stat().st_mtime_ns
    _, err = thinwire("compare", "--out", "cmp", "--resume", folder=tmp_path)
    assert "run 1 of 2: data_parallel, seed 0" in err
    assert "run 2 of 2" not in err
    assert done.stat().st_mtime_ns == before, "what is finished is left alone"
    assert [row["errors"] for row in results_of(tmp_path / "cmp")["strategies"]] == [[], []]


def test_when_every_run_fails_there_is_no_table(tmp_path: Path) -> None:
    task = "tests.user_task:noisy(fault='raise', step=3)"
    arguments = ("compare", "data_parallel", "--task", task, "--epochs", "1", "--seeds", "2", "--out", "cmp")
    out, err = thinwire(*arguments, folder=tmp_path, expect=1)
    assert "no run finished:\n  data_parallel, seed 0: rank 0 failed" in err
    assert out == ""


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    settings = ("--epochs", "5", "--seeds", "2", "--ranks", "2", "--link", "1gbit", "--out", "cmp", *NO_BASELINE)
    process = start("compare", "data_parallel", *settings, folder=tmp_path)
    assert process.stderr is not None
    while "run 2 of 2" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of it
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "what is finished is kept. To go on: thinwire compare --out cmp --resume" in err
    assert "Traceback" not in err
    finished = [row["seeds"] for row in results_of(tmp_path / "cmp")["strategies"]]
    assert finished == [[0]]
    assert "Runs not finished" in (tmp_path / "cmp" / "report.html").read_text()
    thinwire("compare", "--out", "cmp", "--resume", folder=tmp_path)
    assert [row["seeds"] for row in results_of(tmp_path / "cmp")["strategies"]] == [[0, 1]]


def test_a_second_comparison_on_the_machine_waits_its_turn(tmp_path: Path) -> None:
    with open(tmp_path / f"thinwire-compare-{os.getuid()}.lock", "w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start("compare", "data_parallel", "--epochs", "1", "--seeds", "1", "--out", "cmp", folder=tmp_path)
        assert process.stderr is not None
        assert "waiting for another comparison on this machine (process 4711)" in process.stderr.readline()
        assert not (tmp_path / "cmp").exists()
        third = start("compare", "data_parallel", "--out", "other", folder=tmp_path)
        assert third.stderr is not None
        third.stderr.readline()
        third.terminate()
        _, err = third.communicate(timeout=30)
        assert (third.returncode, err) == (130, "thinwire: stopped by SIGTERM\n")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (tmp_path / "cmp" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "unknown strategy 'a'"),
        ([*SPECS, "data_paralel", "data_parallel(bucket_mb=1)", "x"], "'data_paralel'; did you mean 'data_parallel'?"),
        (["data_parallel", "data_parallel( )"], "data_parallel is given twice"),
        (["data_parallel(bucket_mb=-1)"], "bucket_mb=-1 is not possible"),
        ([], "compare what?"),
        (["data_parallel", "--link", "fast", "--ranks", "2"], "link 'fast': expected a rate"),
        (["data_parallel", "--link", "0", "--ranks", "2"], "link '0': expected a rate"),
        (["data_parallel", "--link", "0mbit", "--ranks", "2"], "possible rates are 1mbit to 10gbit"),
        (["data_parallel", "--link", "1gbit,1h", "--ranks", "2"], "link '1gbit,1h'"),
        (["data_parallel", "--link", "1gbit,10s", "--ranks", "2"], "possible latencies are 0ms to 2s"),
        (["data_parallel", "--nodes", "3", "--ranks", "2"], "3 nodes for 2 ranks; possible: 1 to 2"),
        (["data_parallel", "--link", "10mbit"], "--link is about several ranks, and there is one; try --ranks 4"),
        (["data_parallel", "--link", "10mbit", "--ranks", "2", "--nodes", "1"], "try --nodes 2"),
        (["data_parallel", "--seeds", "0"], "compare: --seeds='0' is not possible"),
        (["data_parallel", "--baseline", "some"], "--baseline"),
        (["data_parallel", "--baseline", "alone"], "--baseline alone is about several ranks, and there is one"),
        (["data_parallel", "--target", "nan"], "--target='nan' is not possible"),
        (["data_parallel", "--strategy", "x"], "--strategy"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "nowhere"], "nowhere holds no comparison (no compare.json); check --out, or give"),
        (["data_parallel", "--out", "/dev/null"], "/dev/null"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    _, err = thinwire("compare", *arguments, folder=tmp_path, expect=2)
    assert message in err
    assert len(err.strip().splitlines()) <= 2, err
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"], "nothing was made"


def test_folders_that_are_not_a_comparison(twice: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    _, err = thinwire("compare", "data_parallel", "--out", "foreign", folder=tmp_path, expect=2)
    assert "foreign holds other things already; give another --out" in err
    _, err = thinwire("compare", "data_parallel", "--out", "foreign", "--resume", folder=tmp_path, expect=2)
    assert "foreign holds no comparison (no compare.json); check --out, or give another for a new one" in err
    _, err = thinwire("report", "foreign", folder=tmp_path, expect=2)
    assert "holds no comparison and no run" in err
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["notes.txt"]
    _, err = thinwire("compare", "data_parallel", "--out", str(twice / "one"), folder=tmp_path, expect=2)
    assert "add --resume" in err
    _, err = thinwire("compare", "--out", str(twice / "one"), "--resume", "--epochs", "9", folder=tmp_path, expect=2)
    assert "was begun with --epochs 2; leave out --epochs" in err
    _, err = thinwire("compare", "data_parallel", "--out", str(twice / "one"), "--resume", folder=tmp_path, expect=2)
    assert "leave the strategies out to resume it" in err


def test_folders_of_another_version_or_half_written(twice: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(twice / "one", folder)
    about = json.loads((folder / "compare.json").read_text())
    summary = folder / "runs" / "1-data_parallel" / "seed-0" / "summary.json"
    old = json.loads(summary.read_text())

    def says(text: str) -> None:
        _, err = thinwire("report", "old", folder=tmp_path, expect=2)
        assert text in err
        assert len(err.strip().splitlines()) == 1

    summary.write_text(json.dumps({k: v for k, v in old.items() if k != "waiting_share"}))
    says("lacks waiting_share; move that run's folder away and do it again")
    summary.write_text(json.dumps(old)[:100])
    says("it is damaged, or not thinwire's")
    summary.unlink()
    thinwire("report", "old", folder=tmp_path)
    assert "Runs not finished" in (folder / "report.html").read_text()
    (folder / "compare.json").write_text(json.dumps({**about, "format": 99}))
    says("has format 99, this version reads 1")
    (folder / "compare.json").write_text(json.dumps({"format": 1, "specs": []}))
    says("lacks seeds, target, errors, command: it is damaged")
    (folder / "compare.json").write_text(json.dumps({**about, "settings": {"colour": "blue"}}))
    _, err = thinwire("compare", "--out", "old", "--resume", folder=tmp_path, expect=2)
    assert "colour" in err
    assert "Traceback" not in err
    (folder / "compare.json").write_text("[1, 2")
    says("it is damaged, or not thinwire's")
    _, err = thinwire("report", "old/runs/1-data_parallel/seed-0", folder=tmp_path, expect=2)
    assert "is not finished; go on with it: thinwire train --out old/runs/1-data_parallel/seed-0 --resume" in err


def test_a_budget_of_minutes_ends_training_after_an_epoch(tmp_path: Path) -> None:
    settings = ("--ranks", "2", "--epochs", "40", "--minutes", "0.01", "--seeds", "1", "--out", "cmp")
    thinwire("compare", "data_parallel", *settings, *NO_BASELINE, folder=tmp_path)
    run = tmp_path / "cmp" / "runs" / "1-data_parallel" / "seed-0"
    epochs = [row["train_seconds"] for row in read_rows(run / "metrics.jsonl")]
    assert 1 <= len(epochs) < 40
    assert epochs[-1] >= 0.6
    assert all(seconds < 0.6 for seconds in epochs[:-1])
    assert json.loads((run / "summary.json").read_text())["epochs"] == len(epochs)


def test_a_reader_that_leaves_does_not_stop_a_comparison(tmp_path: Path) -> None:
    compare = [*programs.PYTHON, "-m", "thinwire", "compare", "data_parallel", "--epochs", "1", "--seeds", "2"]
    command = f"{shlex.join([*compare, '--out', 'cmp'])} 2>&1 | head -1"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(tmp_path)}
    subprocess.run(command, shell=True, cwd=tmp_path, env=env, timeout=100, check=True, capture_output=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "cmp" / "report.html").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert results_of(tmp_path / "cmp")["strategies"][0]["seeds"] == [0, 1]


def test_what_a_killed_comparison_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    process = start("compare", "data_parallel", "--epochs", "9", "--seeds", "1", "--out", "cmp", folder=tmp_path)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cmp" / "runs").glob("*/seed-0/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    left = list(tmp_path.glob(f"thinwire-{process.pid}-*"))
    assert left
    elsewhere = tmp_path / f"thinwire-{process.pid}-{0:08x}-of-another-machine"
    elsewhere.mkdir()
    (tmp_path / "thinwire-notes-mine").mkdir()
    (tmp_path / f"thinwire-{os.getpid()}-running").mkdir()
    thinwire("compare", "--out", "cmp", "--resume", folder=tmp_path)
    remaining = {path.name for path in tmp_path.glob("thinwire-*-*") if path.is_dir()}
    assert remaining == {"thinwire-notes-mine", f"thinwire-{os.getpid()}-running", elsewhere.name}
    assert not list(Path("/tmp").glob(f"thinwire-{process.pid}-*")), "where sockets were, whose names have a limit"
