"""Figures: axes, learning curves, the Pareto front and timelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compare.comparisons import DENSE, SPARSE, compare
from tests.compare.pages import drawn, row, text
from thinwire.compare.files import run_place
from thinwire.compare.report import page
from thinwire.compare.report.axes import metric_axis
from thinwire.compare.report.pareto import Point, pareto_front
from thinwire.compare.report.style import short
from thinwire.compare.report.timeline import timelines, without
from thinwire.compare.results import read_results
from thinwire.run.records import RunFolder


def test_nothing_sent_has_a_place_on_a_log_axis(tmp_path: Path) -> None:
    compare(tmp_path, [DENSE, SPARSE, "alone"], (0,))
    run = RunFolder(tmp_path / run_place(2, "alone", 0))
    nothing = {"train": {"inside": 10**6, "between": 0}, "eval": {"inside": 0, "between": 10**4}}
    run.save_summary(json.loads(run.summary.read_text()) | {"wire_bytes_by_purpose": nothing})
    html = page(read_results(tmp_path))
    figure = drawn(html)["front-bytes"]
    axis = figure["layout"]["xaxis"]
    assert (axis["type"], axis["ticktext"][0]) == ("log", "0")
    assert figure["data"][-1]["x"] == [axis["tickvals"][0]]
    assert "On this log scale 0 is drawn at the left edge." in text(html)
    assert "×\u00a0alone" in html
    assert "against one machine alone" in text(html) or "than one machine alone" in text(html)


def test_accuracies_near_100_percent_are_drawn_apart(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [DENSE, SPARSE], (0,)))
    axis = drawn(html)["curve-train_seconds"]["layout"]["yaxis"]
    places = dict(zip(axis["ticktext"], axis["tickvals"], strict=True))
    assert {"50 %", "80 %", "90 %", "95 %"} <= set(places)
    assert places["95 %"] - places["90 %"] > 0.7 * (places["80 %"] - places["50 %"])
    assert "does not begin at 0" in text(html)
    low, high = axis["range"]
    heights = [y for trace in drawn(html)["curve-train_seconds"]["data"] for y in trace["y"]]
    assert low < min(heights) < max(heights) < high


@pytest.mark.parametrize(
    ("metric", "values", "begins_at_0"),
    [("accuracy", [20.0, 70.0], False), ("accuracy", [2.0, 70.0], True), ("loss", [0.1, 2.0], True),
     ("loss", [1.5, 2.0], False), ("accuracy", [96.0, 98.0], False), ("accuracy", [100.0, 100.0], False),
     ("accuracy", [50.0, 100.0], False), ("accuracy", [0.0], True)],
)  # fmt: skip
def test_every_value_is_inside_of_its_axis_and_a_cut_axis_says_so(
    metric: str, values: list[float], begins_at_0: bool
) -> None:
    axis = metric_axis(metric, values)
    low, high = axis.layout["range"]
    assert all(low <= axis.position(value) <= high for value in values)
    assert ("does not begin at 0" in axis.remark) == (not begins_at_0)
    assert begins_at_0 == (low == 0)
    places = [axis.position(value) for value in sorted(values)]
    assert places == sorted(places)


def test_bytes_that_cost_are_those_between_nodes_where_there_are_several(tmp_path: Path) -> None:
    """ "quiet" sends most inside nodes: it was to the right of "loud", though its link carries less."""
    results = compare(tmp_path, ["loud", "quiet"], (0,))
    run = RunFolder(tmp_path / run_place(1, "quiet", 0))
    sent = {"train": {"inside": 10**12, "between": 3_000_000}, "sync": {"inside": 5, "between": 1_000_000},
            "eval": {"inside": 7, "between": 10**11}}  # fmt: skip
    run.save_summary(json.loads(run.summary.read_text()) | {"wire_bytes_by_purpose": sent})
    rows = [json.loads(line) | {"training_bytes_between": 4_000_000} for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = page(read_results(results.folder))
    _, loud, quiet = drawn(html)["front-bytes"]["data"]
    assert quiet["x"] == [4_000_000]
    assert quiet["x"] < loud["x"]
    assert drawn(html)["curve-bytes"]["data"][1]["x"][-1] == 4_000_000
    title = drawn(html)["front-bytes"]["layout"]["xaxis"]["title"]["text"]
    assert title == "bytes between nodes (log scale)"
    assert "4.00 MB" in row(html, 2)
    assert "100 GB" in row(html, 5), "evaluation stands apart"
    one = page(compare(tmp_path / "one", ["loud"], (0,), nodes=1))
    assert drawn(one)["curve-bytes"]["layout"]["xaxis"]["title"]["text"] == "bytes per rank (log scale)"


def test_many_strategies_differ_in_colour_or_dash(tmp_path: Path) -> None:
    html = page(compare(tmp_path, [f"local_sgd(every={i})" for i in range(1, 12)], (0,)))
    lines = [trace["line"] for trace in drawn(html)["curve-train_seconds"]["data"]]
    assert len({(line["color"], line["dash"]) for line in lines}) == 11


def test_the_front_is_what_nothing_beats() -> None:
    points = [Point(0, 1, 90), Point(1, 2, 89), Point(2, 3, 95), Point(3, 3, 94), Point(4, 9, 95)]
    assert [point.strategy for point in pareto_front(points, 1)] == [0, 2]
    assert [point.strategy for point in pareto_front(points, -1)] == [0, 1]


def test_computing_is_the_step_without_waiting(tmp_path: Path) -> None:
    assert without(0, 10, [(6, 12), (2, 3), (2, 2.5), (-4, -1)]) == [(0, 2), (3, 6)]
    results = compare(tmp_path, [DENSE], (0,), ranks=10)
    (figure,) = timelines(0, results.entries[0])
    assert figure is not None
    assert "The first 8 of 10 ranks." in figure.reading
    computing, waiting, wire = figure.data
    steps = [r for r in results.entries[0].records[0].timeline if r["kind"] == "step" and r["rank"] < 8]
    assert sum(computing["x"]) + sum(waiting["x"]) == pytest.approx(1000 * sum(r["seconds"] for r in steps))
    assert len(wire["x"]) == 8 * 4 * 3


def test_long_names_keep_both_ends() -> None:
    assert short(DENSE) == DENSE
    assert short(SPARSE, 30) == "data_parallel(r…(ratio=0.01)))"
    assert len(short(SPARSE, 31)) == 31
