"""Series that strategies declare: whose figure is drawn how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.compare.report.series import declared_series, series_figures
from thinwire.compare.results import Entry, Record, Results


def entry(spec: str, title: str, draw: str, values: list[Any]) -> Entry:
    about = {"title": title, "draw": draw, "about": "", "row": "layer", "cell": "rank"}
    rows = [{"epoch": epoch, "value": value} for epoch, value in enumerate(values, 1)]
    return Entry(spec, [Record(0, Path("run"), {"series": {"value": about}}, rows, [])])


def test_two_strategies_may_use_one_name_for_different_things() -> None:
    entries = [
        entry("one", "Speed", "lines", [1.0, 2.0]),
        entry("two", "Rank", "heatmap", [{"a": [1, 2]}, {"a": [2, 2]}]),
        entry("three", "Speed", "lines", [3.0, 4.0]),
    ]
    results = Results(Path("folder"), entries, "thinwire compare")
    found = {s.title: [(i, f.title) for i, _, f in series_figures(n, s, results)] for n, s in declared_series(results)}
    assert found == {"Speed": [(0, "Speed, one"), (2, "Speed, three")], "Rank": [(1, "Rank, two")]}


def test_lines_that_never_change_are_not_drawn() -> None:
    results = Results(Path("folder"), [entry("one", "Speed", "lines", [1.0, 1.0])], "thinwire compare")
    ((name, series),) = declared_series(results)
    assert list(series_figures(name, series, results)) == []
