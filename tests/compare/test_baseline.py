"""One machine alone beside a comparison: run when asked for, or where it costs little; told where it is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.compare.test_runner import results_of, thinwire
from thinwire.compare.baseline import NOT_RUN, Decision, decide, initial_decision
from thinwire.config import CompareConfig
from thinwire.errors import UsageError
from thinwire.run.records import read_rows


def run(train_seconds: float, waiting: float = 0.0, **more: Any) -> dict[str, Any]:
    """The summary of a run that spent a second on other things."""
    return {
        "ranks": 4, "nodes": 2, "seconds": train_seconds + 1, "train_seconds": train_seconds, "waiting_share": waiting,
        **more,
    }  # fmt: skip


def test_it_is_run_up_to_a_quarter_of_the_time_of_the_others() -> None:
    others = [run(39)] * 3
    assert decide({"data_parallel": [run(16)], "b": others}, seeds=1) == Decision(
        run=True, seconds=32, others_seconds=137
    )
    found = decide({"data_parallel": [run(18)], "b": others}, seeds=1)
    assert found == Decision(run=False, seconds=36, others_seconds=139)


def test_only_computing_counts_and_machines_are_nodes_or_else_ranks() -> None:
    def seconds(summary: dict[str, Any], seeds: int = 3, minutes: float | None = None) -> float | None:
        found = decide({"data_parallel": [summary] * seeds}, seeds, minutes)
        assert found is not None
        return found.seconds

    assert seconds(run(10, waiting=0.9)) == pytest.approx(3 * 2 * 1)
    assert seconds(run(10, waiting=0.9, nodes=1)) == pytest.approx(3 * 4 * 1)
    assert seconds(run(10), minutes=0.25) == 3 * 15, "no run is longer than --minutes"


def test_without_data_parallel_the_median_strategy_is_the_measure() -> None:
    runs = {"a": [run(1), run(3)], "b": [run(100)], "c": [run(5)], "failed": []}
    found = decide(runs, seeds=1)
    assert found is not None
    assert found.seconds == 2 * 5
    assert decide({"failed": []}, seeds=1) is None


def test_what_is_known_before_the_runs() -> None:
    left_out = Decision(run=False, seconds=9, others_seconds=1)
    auto = CompareConfig(ranks=4)
    assert initial_decision(auto, ["a"], None) is None
    assert initial_decision(auto, ["a"], left_out) == left_out, "what was decided stays"
    assert initial_decision(auto, ["a", "alone"], None) == NOT_RUN, "it is there already"
    assert initial_decision(CompareConfig(ranks=1), ["a"], None) == NOT_RUN
    assert initial_decision(CompareConfig(ranks=3, nodes=2), ["a"], None) == NOT_RUN
    assert initial_decision(CompareConfig(ranks=4, baseline="none"), ["a"], Decision(run=True)) == NOT_RUN
    asked = CompareConfig(ranks=3, link="1gbit", baseline="alone")
    assert initial_decision(asked, ["a"], left_out) == Decision(run=True)
    for impossible, message in (
        (CompareConfig(baseline="alone"), "try --ranks 4"),
        (CompareConfig(ranks=5, nodes=2, baseline="alone"), "2 nodes share 5; try --ranks 6"),
    ):
        with pytest.raises(UsageError, match=message):
            initial_decision(impossible, ["a"], None)


# ---- in a comparison


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, program_server: None) -> Path:
    """A folder with a comparison without a baseline."""
    folder = tmp_path_factory.mktemp("compared")
    settings = ("--ranks", "2", "--epochs", "1", "--seeds", "1", "--baseline", "none", "--out", "cmp")
    thinwire("compare", "data_parallel", *settings, folder=folder)
    return folder


def strategies(folder: Path) -> list[str]:
    return [row["strategy"] for row in results_of(folder / "cmp")["strategies"]]


def resume(folder: Path, *options: str) -> str:
    return thinwire("compare", "--out", "cmp", "--resume", *options, folder=folder)[1]


def another(compared: Path, folder: Path, seconds: float) -> Path:
    """The same comparison, with a run that took so long."""
    shutil.copytree(compared / "cmp", folder / "cmp")
    say_it_took(folder, seconds)
    return folder


def say_it_took(folder: Path, seconds: float) -> None:
    summary = folder / "cmp" / "runs" / "1-data_parallel" / "seed-0" / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "seconds": seconds}))


def about(folder: Path) -> Any:
    return json.loads((folder / "cmp" / "compare.json").read_text())["baseline"]


def test_a_baseline_that_costs_little_is_run_and_can_be_taken_away(compared: Path, tmp_path: Path) -> None:
    folder = another(compared, tmp_path, seconds=1000)
    err = resume(folder, "--baseline", "auto")
    assert "run 2 of 2: alone, seed 0" in err
    assert strategies(folder) == ["data_parallel", "alone"]
    assert about(folder)["run"] is True
    both = [folder / "cmp" / "runs" / name / "seed-0" for name in ("1-data_parallel", "2-alone")]
    parallel, alone = (json.loads((run / "summary.json").read_text()) for run in both)
    assert alone["steps"] == parallel["steps"]
    assert alone["samples_per_second"] * alone["train_seconds"] == pytest.approx(1437, abs=5)
    sent = [row for row in read_rows(both[1] / "ledger.jsonl") if row["purpose"] == "train"]
    assert sum(row["wire_bytes"] for row in sent) == 0

    assert "run" not in resume(folder, "--baseline", "none")
    assert strategies(folder) == ["data_parallel"]
    assert "run" not in resume(folder), "what was chosen stays"
    assert strategies(folder) == ["data_parallel"]
    assert "run" not in resume(folder, "--baseline", "alone"), "it was done already"
    assert strategies(folder) == ["data_parallel", "alone"]
    thinwire("compare", "data_parallel", "--out", "cmp", "--resume", folder=folder)


def test_a_baseline_that_costs_much_is_left_out_until_it_is_asked_for(compared: Path, tmp_path: Path) -> None:
    folder = another(compared, tmp_path, seconds=0.001)
    line = "so it is left out; to run it: thinwire compare --out cmp --resume --baseline alone"
    assert line in resume(folder, "--baseline", "auto")
    assert strategies(folder) == ["data_parallel"]
    decided = about(folder)
    assert decided["run"] is False
    assert decided["others_seconds"] == 0.001
    err = resume(another(folder, tmp_path / "later", seconds=1000))
    assert line in err
    assert "run 2" not in err, "what was decided stays"
    assert about(tmp_path / "later") == decided
    assert "run 2 of 2: alone, seed 0" in resume(folder, "--baseline", "alone")
    assert strategies(folder) == ["data_parallel", "alone"]


def test_a_baseline_may_fail_unless_it_was_asked_for(tmp_path: Path, program_server: None) -> None:
    fault = tmp_path / "happened"
    fault.touch()
    task = f"tests.user_task:noisy(fault='raise', step=3, once={str(fault)!r})"
    settings = ("--task", task, "--ranks", "2", "--epochs", "1", "--seeds", "1", "--baseline", "none", "--out", "cmp")
    thinwire("compare", "data_parallel", *settings, folder=tmp_path)
    say_it_took(tmp_path, seconds=1000)
    fault.unlink()
    err = resume(tmp_path, "--baseline", "auto")
    assert "one machine alone, the automatic baseline, failed; the other runs are not affected" in err
    assert "alone, seed 0: rank" in err
    assert "a fault of the user's own" in err
    assert "to go without it: thinwire compare --out cmp --resume --baseline none" in err
    assert [len(row["errors"]) for row in results_of(tmp_path / "cmp")["strategies"]] == [0, 1]
    assert "Runs that failed" in (tmp_path / "cmp" / "report.html").read_text()
    fault.unlink()
    options = ("--out", "cmp", "--resume", "--baseline", "alone")
    assert "1 of 2 runs failed:\n  alone, seed 0" in thinwire("compare", *options, folder=tmp_path, expect=1)[1]
    assert "failed" not in resume(tmp_path, "--baseline", "none"), "it is no longer part of the comparison"


def test_all_is_not_done_while_a_baseline_may_follow(compared: Path, tmp_path: Path) -> None:
    folder = another(compared, tmp_path, seconds=1000)
    (folder / "cmp" / "runs" / "1-data_parallel" / "seed-0" / "summary.json").unlink()
    lines = resume(folder, "--baseline", "auto").splitlines()
    first = lines.index("run 1 of 1: data_parallel, seed 0") + 1
    assert lines[first].endswith("; all done, unless a baseline follows")
    followed = "run 2 of 2: alone, seed 0" in lines
    assert sum(line.endswith("; all done") for line in lines) == followed


def test_a_comparison_of_an_earlier_version_gets_none_unless_asked(compared: Path, tmp_path: Path) -> None:
    folder = another(compared, tmp_path, seconds=1000)
    file = folder / "cmp" / "compare.json"
    old = json.loads(file.read_text())
    del old["baseline"], old["settings"]["baseline"]
    file.write_text(json.dumps(old))
    assert "run" not in resume(folder)
    assert strategies(folder) == ["data_parallel"]
    file.write_text(json.dumps({**old, "baseline": {"run": "perhaps"}}))
    _, err = thinwire("compare", "--out", "cmp", "--resume", folder=folder, expect=2)
    assert "compare.json: run='perhaps' is not possible" in err


def test_it_is_the_last_of_the_strategies_and_of_every_seed(tmp_path: Path, program_server: None) -> None:
    settings = ("--ranks", "2", "--epochs", "1", "--seeds", "2", "--baseline", "alone", "--out", "cmp")
    _, err = thinwire("compare", "local_sgd", *settings, folder=tmp_path)
    order = [line.partition(": ")[2] for line in err.splitlines() if line.startswith("run ")]
    assert order == ["local_sgd, seed 0", "alone, seed 0", "local_sgd, seed 1", "alone, seed 1"]
    assert strategies(tmp_path) == ["local_sgd", "alone"]
    assert about(tmp_path) == {"run": True, "seconds": None, "others_seconds": None}
