"""benchmarks/cifar10: its tables, its results file, its page, and a cell that goes on on another machine."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import programs
from thinwire import registry
from thinwire.config import RunConfig
from thinwire.errors import Stopped
from thinwire.launch.launcher import stopped_by_signals
from thinwire.run.records import RunFolder, read_rows
from thinwire.tasks.loading import check_task

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "benchmarks"))
tables, cells, results, goals, packing, render, stopping = (
    importlib.import_module(f"cifar10.{name}")
    for name in ("tables", "cells", "results", "goals", "packing", "render", "stopping")
)  # fmt: skip
ALL = {
    cell.key: cell
    for scale in tables.SCALES
    for table in tables.TABLES
    for cell in cells.cells(table, scale, seeds=1, tune=True)
}
SUMMARY = {
    "wire_bytes_by_purpose": {"train": {"inside": 300, "between": 100}, "eval": {"inside": 7, "between": 7}},
    "artifacts": [{"name": "factored", "parameters": 10, "ratio": 9.5, "value": 89.0, "file": "x", "bytes": 40}],
    "nodes": 2, "value": 90.0, "ranks": 4, "parameters": 95, "seconds": 60.04, "train_seconds": 50.0,
}  # fmt: skip


# ---- tables


@pytest.mark.parametrize("strategy", sorted({cell.settings["strategy"] for cell in ALL.values()}))
def test_every_strategy_of_a_table_exists(strategy: str) -> None:
    registry.check("strategies", strategy)


def test_everything_else_of_a_table_exists() -> None:
    for cell in ALL.values():
        check_task(cell.settings["task"])
        for kind, name in (("models", "model"), ("optimizers", "optimizer"), ("schedules", "schedule")):
            registry.check(kind, cell.settings[name])


def test_tables_share_cells_and_cells_differ_by_their_settings() -> None:
    assert len({json.dumps(cell.settings) for cell in ALL.values()}) == len(ALL)
    exact = cells.Cell("full", tables.Row("main", "data_parallel"), 0, 30)
    assert {"compression", "periodic", "pareto", "ist"} <= set(results.tables_with(exact))
    assert exact.settings["task"] == "cifar10", "the test set"
    assert cells.Cell("full", exact.row, 0, 30, tune=True).settings["task"] == "cifar10(held_out=5000)"
    shorter = [cell for cell in ALL.values() if cell.row.epochs < 1 and cell.scale == "full" and not cell.tune]
    assert [cell.settings["epochs"] for cell in shorter] in ([], [20, 12])


def test_the_command_of_a_cell_has_its_settings() -> None:
    for cell in ALL.values():
        words = cell.command.split()
        assert words[:2] == ["thinwire", "train"]
        assert words[-4:] == ["--data", "DIR", "--out", "DIR2"]
        for name, value in cell.settings.items():
            assert (f"--{name.replace('_', '-')}" in words) == (value is not None and value is not False)


def test_goals_are_about_rows_of_their_table() -> None:
    for table in tables.TABLES.values():
        for goal in table.goals:
            assert {*goal.rows, goal.than} <= set(table.rows)
            assert any(x is not None for x in (goal.points, goal.sent, goal.ratio, goal.accuracy))


# ---- results


def finished(row: Any, seed: int = 0, **changes: Any) -> dict[str, Any]:
    cell = cells.Cell("full", row, seed, 30)
    return {**results.record(cell, SUMMARY, "cpu"), **changes}


def test_a_record_has_what_was_measured() -> None:
    found = finished(tables.Row("main", "data_parallel"))
    assert (found["training_bytes_per_rank"], found["training_bytes_between"]) == (100, 100)
    assert found["small_model"] == {"parameters": 10, "ratio": 9.5, "accuracy": 89.0}
    assert (found["accuracy"], found["nodes"], found["held_out"], found["epochs"]) == (90.0, 2, 0, 30)


def test_results_are_merged_and_a_failure_replaces_no_result(tmp_path: Path) -> None:
    own = results.Results(tmp_path / "results.json")
    one, other = (finished(tables.Row("main", strategy)) for strategy in ("data_parallel", "local_sgd"))
    own.add(one, other)
    own.add({**one, "accuracy": 91.0}, {"key": other["key"], "scale": "full", "failed": "the loss is nan"})
    again = results.Results(tmp_path / "results.json")
    assert again.cells == {one["key"]: {**one, "accuracy": 91.0}, other["key"]: other}
    (tmp_path / "results.json").write_text('{"format": 0}')
    with pytest.raises(SystemExit, match="has format 0"):
        results.Results(tmp_path / "results.json")


def test_a_goal_is_reached_by_means_over_seeds(tmp_path: Path) -> None:
    own = results.Results(tmp_path / "results.json")
    goal = next(goal for goal in tables.TABLES["ab"].goals if goal.sent)
    assert {text.partition(":")[0] for text in goals.verdict(own, goal)} == {"not measured yet"}
    sent, row = "training_bytes_per_rank", goal.rows[0]
    own.add(*(finished(goal.than, seed, **{"accuracy": 93.0 + seed, sent: 1000}) for seed in (0, 1)))
    small = {"parameters": 10, "ratio": 9.5, "accuracy": 93.0}
    own.add(*(finished(row, seed, **{"accuracy": 90.0, sent: 200, "small_model": small}) for seed in (0, 1)))
    expected = (
        f"**reached** (-0.50 points, 20.0 % of the bytes, 100.0 % between nodes, 9.5 : 1; 2 seeds): `{row.strategy}`"
    )
    assert goals.verdict(own, goal)[0] == expected
    for name, worse in (("small_model", small | {"accuracy": 92.9}), (sent, 201), ("small_model", None)):
        second = {"accuracy": 93.0, sent: 200, "small_model": small, name: worse}
        own.add(finished(row, 1, **second))
        assert goals.verdict(own, goal)[0].startswith("**not reached**"), name


def test_the_rest_of_a_cell_is_estimated_from_what_is_known(tmp_path: Path) -> None:
    own = results.Results(tmp_path / "results.json")
    cell = cells.Cell("full", tables.Row("main", "diloco"), 0, 30)
    seconds = [own.estimate(cell, tmp_path)]
    own.add(finished(tables.Row("main", "data_parallel"), seconds=30 * 100.0))
    seconds.append(own.estimate(cell, tmp_path))
    own.add(finished(tables.Row("main", "diloco"), seed=1, seconds=30 * 50.0))
    seconds.append(own.estimate(cell, tmp_path))
    run = cell.folder(tmp_path)
    run.path.mkdir(parents=True)
    run.metrics.write_text(json.dumps({"step": 140, "epoch": 20, "seconds": 20 * 40.0}) + "\n")
    seconds.append(own.estimate(cell, tmp_path))
    by_epoch = [cell.model.epoch_seconds, 100, 50]
    expected = [results.START_SECONDS + 1.1 * 30 * each for each in by_epoch]
    assert seconds == pytest.approx([*expected, results.START_SECONDS + 1.1 * 10 * 40])


# ---- page


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    """To draw it again: python benchmarks/cifar10/run.py --out DIR2 --render."""
    for name in ("results.md", "results.json"):
        shutil.copy(DOCS / name, tmp_path)
    render.draw(tmp_path)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_text() for file in DOCS.glob("results*")}


def test_the_results_of_the_page_are_complete() -> None:
    found = results.Results(DOCS / "results.json").cells.values()
    assert found
    fields = set(finished(tables.Row("main", "data_parallel")))
    for one in found:
        assert set(one) == ({"key", "row", "scale", "failed"} if "failed" in one else fields)
        assert not any(place in json.dumps(one) for place in ("/tmp", "/home", "/work"))
        if "failed" not in one:
            assert 0 <= one["accuracy"] <= 100
            assert one["held_out"] >= 0
            assert one["training_bytes_between"] <= one["ranks"] * one["training_bytes_per_rank"] + one["ranks"]
            assert one["nodes"] == (2 if one["ranks"] > 1 else 1)
            assert not one["revision"].endswith("dirty")


def test_a_page_with_results_has_their_rows_and_pictures(tmp_path: Path) -> None:
    shutil.copy(DOCS / "results.md", tmp_path)
    own = results.Results(tmp_path / "results.json")
    rows = tables.TABLES["compression"].rows[:2]
    own.add(finished(rows[0], accuracy=93.0, training_bytes_between=4_000_000_000))
    own.add(finished(rows[1], accuracy=92.9, training_bytes_between=1_000_000_000))
    own.add(finished(rows[0], seed=1, accuracy=94.0, training_bytes_between=4_000_000_000))
    render.draw(tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "| 1. ResNet-18: `data_parallel` | 93.50 % ± 0.71 | – | 2 | 0.0 MB | 4.00 GB | – |" in page
    assert (
        "| 2. ResNet-18: `data_parallel(reducer=maxnorm)` | 92.90 % | -0.60 | 1 | 0.0 MB | 1.00 GB | 25.0 % |" in page
    )
    drawing = (tmp_path / "results-full-compression.svg").read_text()
    assert drawing.count('class="point"') == 2
    assert "data_parallel(reducer=maxnorm)" in drawing
    render.draw(tmp_path)
    assert (tmp_path / "results.md").read_text() == page


# ---- runs that are stopped, packed and continued


def checkpoint(run: RunFolder, step: int, ranks: int) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    for rank in range(ranks):
        (folder / f"rank-{rank}.json").write_text("{}")


def watched(tmp_path: Path, epoch: int, seconds_left: float) -> bool:
    """Whether a run of three epochs is stopped if it writes the checkpoint of an epoch of 10 s now."""
    run = RunFolder(tmp_path / f"{epoch}-{seconds_left}")
    config = RunConfig(epochs=3, ranks=2)
    try:
        with stopped_by_signals(), stopping.stopped_in_time(run, config, time.monotonic() + seconds_left) as watch:
            time.sleep(3 * stopping.POLL_SECONDS)  # it looks before there is a checkpoint
            run.path.mkdir()
            run.append(run.metrics, [{"step": 7 * e, "epoch": e, "seconds": 10.0 * e} for e in range(1, epoch + 1)])
            checkpoint(run, 7 * epoch, ranks=2)
            threading.Event().wait(5 * stopping.POLL_SECONDS)
    except Stopped:
        assert watch.has_stopped
        return True
    assert not watch.has_stopped
    return False


def test_a_run_is_stopped_if_its_next_epoch_would_end_too_late(tmp_path: Path) -> None:
    assert watched(tmp_path, epoch=1, seconds_left=8.0)
    assert not watched(tmp_path, epoch=1, seconds_left=60.0)
    assert not watched(tmp_path, epoch=3, seconds_left=8.0), "there is no next epoch"
    assert watched(tmp_path, epoch=3, seconds_left=2 * stopping.POLL_SECONDS), "the time is over"


DRIVER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from cifar10 import cells, run, tables
from thinwire.launch.launcher import launch

model = tables.Model("MLP", "mlp(width=8, depth=1, norm=True)", 0.1)
tables.SCALES["tiny"] = tables.Scale(3, 16, {"mlp": model}, train=160, held_out=50, autocast=False, seeds=1)
tables.TABLES.clear()
tables.TABLES["tiny"] = tables.Table("Tiny", [tables.Row("mlp", "local_sgd", ranks=2)])
cells.NODES = None
if __name__ == "__main__":
    if sys.argv[1] == "one epoch":
        from pathlib import Path
        (cell,) = cells.cells("tiny", "tiny", 1)
        launch(cell.config(Path(sys.argv[2]), Path(sys.argv[3]), "cpu").model_copy(update={"minutes": 1e-9}))
        cell.folder(Path(sys.argv[3])).summary.unlink()
    else:
        run.main()
"""


def call(folder: Path, *words: str) -> str:
    (folder / "driver.py").write_text(DRIVER)
    command = [*programs.PYTHON, str(folder / "driver.py"), str(ROOT / "benchmarks"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def made_up_images(folder: Path) -> None:
    """Files with the format of CIFAR-10; the training files are one."""
    random = np.random.default_rng(0)
    table = random.integers(0, 256, (10000, 3073), np.uint8)
    table[:, 0] %= 10
    (folder / "data_batch_1.bin").write_bytes(table.tobytes())
    for i in range(2, 6):
        (folder / f"data_batch_{i}.bin").symlink_to("data_batch_1.bin")


@pytest.mark.usefixtures("program_server")
def test_a_cell_that_was_packed_goes_on_elsewhere_exactly(tmp_path: Path) -> None:
    made_up_images(tmp_path)
    tiny = ["tiny", "--scale", "tiny", "--device", "cpu", "--data", "."]
    whole = call(tmp_path, *tiny, "--out", "whole", "--seeds", "2", "--lanes", "2")
    assert "2 of 2 cells are finished, 0 failed" in whole
    assert len(list((tmp_path / "whole" / "logs").iterdir())) == 2
    listed = call(tmp_path, *tiny, "--out", "whole", "--seeds", "2", "--only", "seed 1", "--list")
    assert "seed 1" in listed
    assert "seed 0" not in listed
    call(tmp_path, "one epoch", ".", "cut")
    assert "begun" in call(tmp_path, *tiny, "--out", "cut", "--list")
    call(tmp_path, *tiny, "--out", "cut", "--minutes", "0", "--pack", "packed", "--part-mib", "0.1")
    parts = sorted(tmp_path.glob("packed.*"))
    assert len(parts) > 1
    assert all(part.stat().st_size <= 0.1 * 2**20 for part in parts)
    unpacked = call(tmp_path, *tiny, "--out", "moved", "--unpack", "packed")
    assert "resuming at step 5 of 15" in unpacked
    files = [json.loads((tmp_path / out / "results.json").read_text())["cells"] for out in ("whole", "moved")]
    one, other = (next(cell for cell in cells if cell["seed"] == 0) for cells in files)
    assert {k: v for k, v in one.items() if "seconds" not in k} == {
        k: v for k, v in other.items() if "seconds" not in k
    }
    rows = [read_rows(tmp_path / out / "cells" / one["key"] / "metrics.jsonl") for out in ("whole", "moved")]
    assert [row["train_loss"] for row in rows[0]] == [row["train_loss"] for row in rows[1]]
    assert f"{one['accuracy']:.2f} %" in call(tmp_path, *tiny, "--out", "moved", "--list")


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_equal_tensors_are_packed_once_and_too_large_checkpoints_are_left_out(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    shared = random.integers(0, 256, 300_000, np.uint8)
    for name, own_bytes in (("equal", 1000), ("differing", 300_000)):
        run = RunFolder(tmp_path / "out" / "cells" / name)
        checkpoint(run, 5, ranks=4)
        for rank in range(4):
            own = random.integers(0, 256, own_bytes, np.uint8)
            save_file({"shared": shared, "own": own}, run.checkpoints / "step-00000005" / f"rank-{rank}.safetensors")
        run.config.write_text(f"# {name}")
    unfinished = [(RunFolder(path), 4) for path in (tmp_path / "out" / "cells").iterdir()]
    left_out = packing.pack(tmp_path / "out", unfinished, tmp_path / "packed", parts=2, part_mib=0.25)
    assert left_out == ["differing"]
    assert sum(path.stat().st_size for path in tmp_path.glob("packed.*")) < 1.2 * len(shared)
    packing.unpack(tmp_path / "packed", tmp_path / "again")
    old, new = (content(tmp_path / out) for out in ("out", "again"))
    assert new == {name: old[name] for name in old if "differing/checkpoints" not in name}
    with pytest.raises(SystemExit, match=r"there is no nothing\.0"):
        packing.unpack(tmp_path / "nothing", tmp_path / "again")
    with pytest.raises(SystemExit, match="allow more --parts"):
        packing.pack(tmp_path / "out", [], tmp_path / "packed", parts=1, part_mib=1e-5)
