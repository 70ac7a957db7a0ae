"""Figures over seeds and epochs, from what runs left behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.test_report import DENSE, compare
from thinwire.results import Record, as_json, read_results, spread


def record(metric: str, *values: float) -> Record:
    rows = [{"train_seconds": 10.0 * i, f"test_{metric}": value} for i, value in enumerate(values, 1)]
    return Record(0, Path(), None, rows, [], [])


def test_the_time_to_a_target_is_the_first_time_it_is_reached() -> None:
    assert record("accuracy", 50, 95, 94, 96).seconds_to(95) == 20
    assert record("accuracy", 50, 94.9).seconds_to(95) is None
    assert record("loss", 2.0, 0.5, 0.7, 0.4).seconds_to(0.5) == 20
    assert record("loss", 2.0, 0.6).seconds_to(0.5) is None
    assert record("accuracy").seconds_to(1) is None


def test_a_spread_is_of_the_sample() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.deviation) == (3.0, pytest.approx(math.sqrt((4 + 1 + 9) / 2)))
    assert spread([5.0]).deviation is None  # type: ignore[union-attr]
    assert spread([]) is None


def test_a_seed_that_diverged_is_left_out_and_results_stay_json(tmp_path: Path) -> None:
    results = compare(tmp_path, [DENSE], seeds=(0, 1, 2))
    path = tmp_path / "runs" / "1-data_parallel" / "seed-1" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "value": math.nan}))
    found = read_results(tmp_path).entries[0].spread("value")
    assert found is not None
    assert found.values == [v for i, v in enumerate(results.entries[0].spread("value").values) if i != 1]  # type: ignore[union-attr]
    json.loads(json.dumps(as_json(read_results(tmp_path)), allow_nan=False))
