"""benchmarks/faults.py: six real faults, what counts as a problem, and the page with its results."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thinwire import registry

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
faults, box, kinds, render = (
    importlib.import_module(name) for name in ("faults", "faults_box", "faults_kinds", "faults_render")
)  # fmt: skip

KILLED = "killed process 12, rank 1"
MESSAGE = "thinwire: rank 1 (process 12) was ended by SIGKILL; --resume goes on"
REFERENCE = {"weights": {"model.safetensors": "a1"}, "rows": "[]"}


def ended(code: int | None = 0, text: str = "", left: tuple[str, ...] = ()) -> Any:
    return box.Ended(code, 1.0, text, list(left))


def problems(fault: str, runs: list[Any], did: str = KILLED, **found: Any) -> list[str]:
    cell = faults.Cell("data_parallel", fault, 0)
    return [text.partition(":")[0] for text in faults.found_problems(cell, did, runs, REFERENCE | found, REFERENCE)]


def test_every_problem_is_found() -> None:
    rank, launcher, cut = "kill -9 of a rank", "kill -9 of the launcher", "newest checkpoint cut off"
    assert problems(rank, [ended(1, MESSAGE), ended()]) == []
    assert problems(rank, [ended()]) == []
    assert problems(launcher, [ended(-9), ended()], "killed the launcher") == []
    assert problems(cut, [ended(1, MESSAGE), ended(0, "checkpoint 5 is damaged")]) == []
    assert problems(cut, [ended(1, MESSAGE), ended()]) == ["unclear"]
    assert problems(rank, [ended(None)]) == problems(rank, [ended(1, MESSAGE), ended(None)]) == ["hang"]
    assert problems(rank, [ended(1, MESSAGE.replace("12", "13")), ended()]) == ["unclear end"]
    assert problems(rank, [ended(1, f"Traceback\n{MESSAGE}"), ended()]) == ["unclear end"]
    assert problems(rank, [ended(3, MESSAGE), ended()]) == ["unclear end"]
    assert problems(rank, [ended(1, MESSAGE), ended(1, MESSAGE)]) == ["not resumed"]
    assert problems(rank, [ended()], weights={"model.safetensors": "b2"}) == ["wrong weights"]
    assert problems(rank, [ended()], rows="[[1]]") == ["wrong rows"]


def test_every_registered_strategy_has_every_fault() -> None:
    cells = faults.chosen_cells(200, 0, [])
    assert len(set(cells)) == 200
    pairs = {(cell.strategy.partition("(")[0], cell.fault) for cell in cells}
    assert pairs == {(name, fault) for name in registry.TABLE["strategies"] for fault in kinds.FAULTS}
    for strategy in faults.STRATEGIES:
        registry.check("strategies", strategy)
    some = faults.chosen_cells(3, 0, ["diloco", "clock"])
    assert [cell.seed for cell in some] == [0, 1, 2]
    assert some[:2] == [cell for cell in cells if "diloco" in cell.key and "clock" in cell.key]


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    place = box.Box(tmp_path / "b")
    try:
        out = place.disk_seen / "run"
        out.mkdir()
        assert place.files_left(out) == place.processes() == []
        files = (place.temporary / "x", out / ".model.12.new", out / "model", place.disk_seen.parents[1] / "x")
        for file in (*files, out / "rank-0.safetensors", out / "rank-0.json", out / "rank-1.safetensors"):
            file.touch()
        scraps = ["run: .model.12.new", "run: rank-1.safetensors of no checkpoint"]
        assert place.files_left(out) == ["temporary: x", *scraps]
        with place.run([], {}, quick=False) as run:
            deadline = time.monotonic() + 20
            while not place.processes() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert run.launcher() in place.processes()
        assert place.processes() == []
    finally:
        place.close()


@pytest.mark.usefixtures("program_server")
def test_after_six_real_faults_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    matrix = faults.Matrix(tmp_path / "found.json", {"cells": {}, "undisturbed": {}}, short=True)
    cells = faults.short_cells(seed=0)
    faults.run_cells(cells, matrix, lanes=3, deadline=float("inf"))
    found = json.loads((tmp_path / "found.json").read_text())["cells"]
    assert found.keys() == {cell.key for cell in cells}
    assert {key: one["problems"] for key, one in found.items() if one["problems"]} == {}
    happened = [one for one in found.values() if one["result"] != "came too late"]
    assert len(happened) >= 4


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    """To draw it again: python benchmarks/faults.py --render."""
    for name in ("reliability.md", "reliability.json"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    render.draw(tmp_path)
    assert (tmp_path / "reliability.md").read_text() == (ROOT / "docs" / "reliability.md").read_text()


def test_the_results_of_the_page_are_complete() -> None:
    data = json.loads((ROOT / "docs" / "reliability.json").read_text())
    assert data.keys() == {"cells", "undisturbed", "date", "revision", "hardware", "versions", "command"}
    assert not any(place in json.dumps(data) for place in ("/tmp", "/home", "/work"))
    happened = render.faults_of(data)
    assert len(happened) >= 200
    pairs = {(strategy.partition("(")[0], fault) for strategy, fault, _ in happened}
    assert pairs == {(name, fault) for name in registry.TABLE["strategies"] for fault in kinds.FAULTS}


def test_a_page_counts_problems(tmp_path: Path) -> None:
    about = {
        "moment": {"phase": "saving", "part": 0.5}, "did": KILLED, "lost_seconds": 2.0, "date": "2026-01-02",
        "revision": "1", "ended_after_seconds": 0.5,
    }  # fmt: skip
    cells = {
        "alone | clock jump | 0": {**about, "result": "went on", "problems": []},
        "alone | clock jump | 1": {**about, "result": "ended, and was resumed", "problems": ["wrong weights: x"]},
        "ist | link | 0": {
            **about,
            "result": "ended, and was resumed",
            "problems": ["left behind: x", "left behind: y"],
        },
        "ist | link | 1": {**about, "result": "came too late", "problems": []},
    }
    data = {
        "cells": cells, "hardware": {"gpu": None, "cpus": 2, "cpu": "C"}, "versions": {"python": "3", "torch": "2"},
    }  # fmt: skip
    text = render.measured(data)
    assert "3 faults: 1 runs went on, 2 ended and were resumed; 2 ended with the files of the undisturbed run" in text
    assert "0 hangs, 1 wrong sums, 0 unclear ends, 1 left behind" in text
    assert "| clock jump | 2 | 1 | 1 | 1 | 0 | 1 | 0 | 0 | 2.0 (2.0) |" in text
    assert "| `alone` | 2 (1 with problems) | – |" in text
    assert "- `ist`, link: left behind: y" in text
    assert "all had ended after 0.5 s (median; at most 0.5 s)" in text
    assert "0 while ranks started, 0 in training, 3 at a checkpoint, 0 while ranks left" in text
