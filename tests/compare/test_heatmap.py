"""The figure of layer ranks over epochs, and its section of the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compare.comparisons import DENSE, LOW, RANK_SERIES, SPARSE, compare
from tests.compare.pages import drawn, json_text, text
from thinwire.compare.report import page
from thinwire.compare.report.heatmap import heatmap
from thinwire.compare.report.style import Figure
from thinwire.compare.results import Entry, Record


def rank_map(*rows: dict[str, Any], seed: int = 0) -> Figure | None:
    """The figure of one run with these rows of metrics."""
    return heatmap("layer_ranks", RANK_SERIES, 0, Entry(LOW, [Record(seed, Path("run"), {}, list(rows), [])]))


def test_ranks_are_shares_of_the_largest_from_the_first_layer_down() -> None:
    figure = rank_map(
        {"epoch": 1, "phase": "warmup", "layer_ranks": {"z": [8, 8], "a": [256, 256]}},
        {"epoch": 2, "phase": "ab", "layer_ranks": {"z": [8, 8], "a": [24, 256]}},
        {"epoch": 3, "layer_ranks": {"z": [2, 8], "a": [16, 256]}},
        seed=4,
    )
    assert figure is not None
    (heatmap,) = figure.data
    assert heatmap["z"] == [[100, 100, 25], [100, 9.375, 6.25]]
    assert heatmap["x"] == [1, 2, 3]
    assert (heatmap["zmin"], heatmap["zmax"]) == (0, 100)
    axis = figure.layout["yaxis"]
    assert dict(zip(axis["ticktext"], axis["tickvals"], strict=True)) == {"z": heatmap["y"][0], "a": heatmap["y"][1]}
    assert axis["range"] == [1.5, -0.5], "the first is on top"
    assert heatmap["text"][1][1] == "layer a, epoch 2: rank 24 of 256 (9 %), phase ab"
    assert heatmap["text"][1][2] == "layer a, epoch 3: rank 16 of 256 (6 %)"
    assert figure.reading == "After epoch 3 of seed 4, every layer had less than full rank."


def test_ranks_that_stay_full_are_drawn_too() -> None:
    figure = rank_map({"epoch": 1, "layer_ranks": {"1": [8, 8], "2": [8, 8]}})
    assert figure is not None
    assert figure.data[0]["z"] == [[100], [100]]
    assert "no layer had less than full rank" in figure.reading
    figure = rank_map({"epoch": 1, "layer_ranks": {"1": [7, 8], "2": [8, 8]}})
    assert figure is not None
    assert "1 of 2 layers had less than full rank" in figure.reading


def test_ranks_that_are_none_are_left_out() -> None:
    garbage = [None, 3, "8", [], [4], [1, 2, 3], [math.nan, 8], [4, math.inf], ["4", 8], [True, 8], [0, 0], [-1, 8],
               [9, 8], [4, 10**400]]  # fmt: skip
    good = {"epoch": 2, "phase": math.nan, "layer_ranks": {"a": [4, 8]}}
    rows = [{"epoch": 1, "layer_ranks": {"a": value}} for value in garbage]
    rows += [{"epoch": 1}, *({"epoch": 1, "layer_ranks": value} for value in (None, [], "x", math.nan, {}))]
    rows += [
        {"layer_ranks": {"a": [4, 8]}},
        *({"epoch": e, "layer_ranks": {"a": [4, 8]}} for e in (None, math.nan, "1", 0, 1e400)),
    ]
    assert rank_map(*rows) is None
    figure = rank_map(*rows, good, {"epoch": 3, "layer_ranks": {"a": [9, 8], "b": [1, 8]}})
    assert figure is not None
    assert figure.data[0]["z"] == [[50, None], [None, 12.5]]
    assert figure.data[0]["text"] == [["layer a, epoch 2: rank 4 of 8 (50 %)", ""],
                                      ["", "layer b, epoch 3: rank 1 of 8 (12 %)"]]  # fmt: skip
    json.dumps(figure.data, allow_nan=False)


def test_epochs_without_ranks_leave_a_hole_of_their_width() -> None:
    figure = rank_map(*({"epoch": epoch, "layer_ranks": {"a": [4, 8]}} for epoch in (2, 3, 10**8, 7)))
    assert figure is not None
    assert figure.data[0]["x"] == [2, 3, 4, 6, 7, 8, 10**8 - 1, 10**8]
    assert figure.data[0]["z"] == [[50, 50, None, None, 50, None, None, 50]]


def test_ranks_are_of_the_first_finished_seed_that_has_some(tmp_path: Path) -> None:
    row = {"epoch": 1, "layer_ranks": {"a": [4, 8]}}
    records = [Record(0, tmp_path, None, [row], []), Record(1, tmp_path, {}, [{"epoch": 1}], []),
               Record(2, tmp_path, {}, [row], []), Record(3, tmp_path, {}, [row], [])]  # fmt: skip
    figure = heatmap("layer_ranks", RANK_SERIES, 6, Entry(LOW, records))
    assert figure is not None
    assert figure.name == "series-layer_ranks-7"
    assert "seed 2" in figure.reading
    assert heatmap("layer_ranks", RANK_SERIES, 6, Entry(LOW, records[:2])) is None


@pytest.mark.parametrize(("layers", "low", "high"), [(1, 100, 150), (5, 200, 300), (52, 800, 900), (400, 800, 900)])
def test_many_layers_are_readable_and_one_is_not_huge(layers: int, low: int, high: int) -> None:
    figure = rank_map({"epoch": 1, "layer_ranks": {f"layer{i}.conv": [4, 8] for i in range(layers)}})
    assert figure is not None
    assert low <= figure.layout["height"] <= high
    axis = figure.layout["yaxis"]
    assert len(axis["tickvals"]) == len(axis["ticktext"])
    assert axis["ticktext"][1:2] == ([] if layers == 1 else [f"layer{axis['tickvals'][1]}.conv"])
    assert len(axis["tickvals"]) == (layers if layers < 60 else 67), "names do not overlap"


def test_long_layer_names_still_differ() -> None:
    names = [f"encoder.layers.layer_{i}.{x}" for i in range(12) for x in ("self_attention.out_projection", "mlp.0")]
    figure = rank_map({"epoch": 1, "layer_ranks": {name: [4, 8] for name in names}})
    assert figure is not None
    labels = figure.layout["yaxis"]["ticktext"]
    assert labels[1] == "…layer_0.mlp.0"
    assert len(set(labels)) == 24
    assert max(map(len, labels)) <= 36
    assert names[0] in figure.data[0]["text"][0][0]


def test_a_section_of_ranks_only_where_there_are_some(tmp_path: Path) -> None:
    assert "Rank of each layer" not in page(compare(tmp_path / "none", [DENSE, SPARSE], (0,)))
    html = page(compare(tmp_path / "one", [DENSE, LOW], (0,), layers=("1", "3")))
    assert "Rank of each layer Each row is a layer" in text(html)
    assert {name for name in drawn(html) if name.startswith("series-layer_ranks")} == {"series-layer_ranks-2"}
    html = page(compare(tmp_path / "two", [LOW, DENSE, "ab(cutoff=0.5)"], (0,)))
    section = html[html.index("<h2>Rank") : html.index("<h2>Timeline")]
    assert re.findall(r"<details( open)?>.*?id=\"(.*?)\"", section) == [
        (" open", "series-layer_ranks-1"),
        ("", "series-layer_ranks-3"),
    ]
    assert "2ab" not in text(f"<body>{section}")
    assert "3ab(cutoff=0.5)" in text(f"<body>{section}")


def test_names_of_layers_stay_text(tmp_path: Path) -> None:
    name = "</script><b>"
    html = page(compare(tmp_path, [LOW], (0,), layers=(name, "&lt;")))
    assert name not in html
    assert "<" not in json_text(html)
    assert html.count("</script>") == 3
    figure = drawn(html)["series-layer_ranks-1"]
    assert figure["layout"]["yaxis"]["ticktext"] == ["&lt;/script&gt;&lt;b&gt;", "&amp;lt;"]
    assert figure["data"][0]["text"][0][0].startswith("layer &lt;/script&gt;&lt;b&gt;, epoch 1: rank 256 of 256")
