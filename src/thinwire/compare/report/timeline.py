"""The figure of a few training steps: when each rank computed, waited and communicated."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from thinwire.common.formats import format_bytes, format_seconds
from thinwire.compare.report.style import GREY, Figure, Trace, hover_text, layout_of
from thinwire.compare.results import Entry, Record

KINDS = {"computing": "#8b95a1", "waiting": "#e0662b", "communication": "#2f78c4"}
MAX_RANKS = 8  # in a figure
MAX_STEP_LABELS = 8


def timelines(index: int, entry: Entry) -> list[Figure]:
    """A few steps in the first run that has a timeline, if there is one; of a sequence, a figure for each part."""
    record = next((record for record in entry.finished if record.timeline), None)
    if record is None:
        return []
    parts = sorted({row.get("part", 0) for row in record.timeline})
    return [_timeline(f"timeline-{index + 1}" + (f"-{part}" if part else ""), entry, record, part) for part in parts]


def _timeline(name: str, entry: Entry, record: Record, part: int) -> Figure:
    """Each rank has two bars: above, its computing thread; below, its communication."""
    everything = [row for row in record.timeline if row.get("part", 0) == part]
    ranks = sorted({row["rank"] for row in everything})
    shown = {rank: place for place, rank in enumerate(ranks[:MAX_RANKS])}
    rows = [row for row in everything if row["rank"] in shown]
    end = max(_span(row)[1] for row in rows)
    unit, unit_name = (1.0, "s") if end > 2 else (1e-3, "ms")
    data = [_lane(kind, found, shown, unit) for kind, found in _by_kind(rows).items() if found]
    xaxis = {"title": {"text": f"time ({unit_name})"}, "range": [0, end / unit], "zeroline": False, "automargin": True}
    yaxis = _rank_axis(list(shown))
    marks = _step_marks(rows, shown, unit)
    layout = layout_of(84 + 46 * len(shown), xaxis=xaxis, yaxis=yaxis, barmode="overlay", **marks)
    layout["margin"] |= {"t": 26}
    title = f"{entry.name}, part {part}" if part else entry.name
    return Figure(name, title, _reading(everything, record.seed, ranks), data, layout)


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The bars of each kind; computing is what is left of the steps without waiting."""
    found: dict[str, list[dict[str, Any]]] = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    for step in (row for row in rows if row["kind"] == "step"):
        holes = [_span(row) for row in found["waiting"] if row["rank"] == step["rank"]]
        for begin, end in without(*_span(step), holes):
            found["computing"].append(step | {"begin": begin, "seconds": end - begin, "name": "computing", "bytes": 0})
    return found


def _span(row: dict[str, Any]) -> tuple[float, float]:
    return row["begin"], row["begin"] + row["seconds"]


def without(begin: float, end: float, holes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of a span of time that are outside of `holes`.

    >>> without(0, 10, [(2, 3), (6, 12)])
    [(0, 2), (3, 6)]
    """
    pieces = []
    for start, stop in sorted(holes):
        if start < end and stop > begin:
            pieces.append((begin, start))
            begin = max(begin, stop)
    return [(start, stop) for start, stop in [*pieces, (begin, end)] if stop > start]


def _lane(kind: str, rows: list[dict[str, Any]], places: dict[int, int], unit: float) -> Trace:
    offset = 0.2 if kind == "communication" else -0.2
    bars = {"base": [row["begin"] / unit for row in rows], "x": [row["seconds"] / unit for row in rows]}
    lane = {"y": [places[row["rank"]] + offset for row in rows], "width": 0.36}
    marker = {"color": KINDS[kind], "line": {"width": 0}}
    return {"type": "bar", "orientation": "h", **bars, **lane, "marker": marker, **hover_text(map(_lane_text, rows))}


def _lane_text(row: dict[str, Any]) -> str:
    what = escape(str(row.get("name") or row["kind"]), quote=False)
    what = f"waiting for {what}" if row["kind"] == "waiting" and what != "waiting" else what
    sent = f", {format_bytes(row['bytes'])}" if row.get("bytes") else ""
    return f"rank {row['rank']}, step {row['step']}<br>{what}: {format_seconds(row['seconds'])}{sent}"


def _rank_axis(ranks: list[int]) -> dict[str, Any]:
    ticks = {"tickvals": list(range(len(ranks))), "ticktext": [f"rank {rank}" for rank in ranks]}
    look = {"showgrid": False, "zeroline": False, "fixedrange": True, "automargin": True, "ticks": ""}
    return ticks | look | {"range": [len(ranks) - 0.45, -0.55]}


def _step_marks(rows: list[dict[str, Any]], places: dict[int, int], unit: float) -> dict[str, Any]:
    """A line where each step begins, and the numbers of the steps above the first rank."""
    steps = [row for row in rows if row["kind"] == "step"]
    lines = []
    for row in steps:
        x, y = row["begin"] / unit, places[row["rank"]]
        line = {"type": "line", "x0": x, "x1": x, "y0": y - 0.44, "y1": y + 0.44}
        lines.append(line | {"line": {"color": GREY, "width": 1}})
    first = [row for row in steps if places[row["rank"]] == 0]
    top = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False, "font": {"size": 11}}
    labels = [top | {"x": row["begin"] / unit, "text": f"step {row['step']}"} for row in first]
    return {"shapes": lines, "annotations": labels if len(labels) <= MAX_STEP_LABELS else []}


def _reading(rows: list[dict[str, Any]], seed: int, ranks: list[int]) -> str:
    steps = [row["step"] for row in rows]
    some = f" The first {MAX_RANKS} of {len(ranks)} ranks." if len(ranks) > MAX_RANKS else ""
    return f"Steps {min(steps)} to {max(steps)} of seed {seed}.{some}"
