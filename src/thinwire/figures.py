"""The figures of a report, as plain data for plotly.js; what follows the page's light or dark look is set there."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from thinwire.results import Entry, Record, Results, Spread
from thinwire.tables import clock, show, size

Trace = dict[str, Any]

# Okabe and Ito's colours for all kinds of sight, shifted to stand out from white and from black alike.
COLOURS = ("#2f78c4", "#e0662b", "#12a07a", "#c7619f", "#c98a0a", "#3a9fd3", "#858d97", "#9a9210")
DASHES = ("solid", "dash", "dot", "dashdot")
PURPOSES = {"train": "#2f78c4", "sync": "#12a07a", "eval": "#c98a0a", "checkpoint": "#c7619f", "start": "#858d97"}
KINDS = {"computing": "#8b95a1", "waiting": "#e0662b", "communication": "#2f78c4"}
GREY = "#858d97"
MOST_RANKS = 8  # in a timeline
MOST_STEP_LABELS = 8


@dataclass(frozen=True)
class Figure:
    """One figure: its place on the page, its words, and what plotly.js draws."""

    name: str
    title: str
    reading: str
    data: list[Trace]
    layout: dict[str, Any]


class Axis(NamedTuple):
    """How a quantity is shown: divided by `unit`, on an axis that looks like `layout`."""

    unit: float
    layout: dict[str, Any]


class Point(NamedTuple):
    """A strategy's result: what it cost, and what it reached."""

    strategy: int
    cost: float
    value: float


def colour(index: int) -> str:
    """The colour of a strategy in every figure."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """The kind of line of a strategy: solid until the colours are used up."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def short(spec: str, most: int = 46) -> str:
    """A spec that fits; both ends are kept because they tell strategies apart.

    >>> short("data_parallel(reducer=topk(ratio=0.01))", 20)
    'data_paral…io=0.01))'
    """
    half = most // 2
    return spec if len(spec) <= most else f"{spec[:half]}…{spec[half + 1 - most :]}"


def better(metric: str) -> int:
    """+1 where more of a metric is better, −1 where less is."""
    return 1 if metric == "accuracy" else -1


def is_number(value: Any) -> bool:
    """Is it there, and finite? A run that diverges records NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


def finite(entry: Entry, key: str, part: str = "") -> Spread | None:
    """A figure of the summaries (or a part of one) over seeds, without what is missing or not a number."""

    return entry.spread(lambda summary: (summary.get(key) or {}).get(part) if part else summary.get(key))


def curves(results: Results, over: str) -> Figure | None:
    """The metric over "train_seconds" or "wire_bytes": a mean line over seeds, in a band from worst to best seed."""
    metric = _metric(results)
    lines = [(i, entry, _epochs(entry, metric)) for i, entry in enumerate(results.entries)]
    axis = _axis(over, [row[over] for _, _, epochs in lines for rows in epochs for row in rows])
    if axis is None:
        return None
    data = [trace for i, entry, epochs in lines if epochs for trace in _curve(i, entry, epochs, over, axis, metric)]
    layout = _layout(320, xaxis=axis.layout, yaxis=_metric_axis(metric)) | _target(results.target, metric)
    what, reading = {
        "train_seconds": ("training time", "Higher to the left is better: the same {} after less time."),
        "wire_bytes": ("bytes sent", "Higher to the left is better: the same {} for fewer bytes sent by each rank."),
    }[over]
    reading = reading.format(metric) if better(metric) > 0 else reading.format(metric).replace("Higher", "Lower")
    band = " A band spans all seeds." if any(len(rows) > 1 for _, _, epochs in lines for rows in epochs) else ""
    return Figure(f"curve-{over}", f"Test {metric} over {what}", reading + band, data, layout)


def front(results: Results, over: str) -> Figure | None:
    """Final metric against "train_seconds" or "wire_bytes_per_rank", with the strategies no other one beats in both."""
    metric = _metric(results)
    points = [point for i, entry in enumerate(results.entries) if (point := _point(i, entry, over))]
    axis = _axis(over, [point.cost for point in points])
    if axis is None:
        return None
    data = [_front_line(points, axis, metric), *(_dot(p, results.entries[p.strategy], axis, metric) for p in points)]
    what = {"train_seconds": "training time", "wire_bytes_per_rank": "bytes sent"}[over]
    side = "Up" if better(metric) > 0 else "Down"
    reading = (
        f"{side} and to the left is better: no strategy beats those on the stepped line in both {metric} and {what}."
        + " Thin bars are the deviation over seeds." * any(len(entry.finished) > 1 for entry in results.entries)
    )
    layout = _layout(320, xaxis=axis.layout, yaxis=_metric_axis(metric))
    return Figure(f"front-{over}", f"Final {metric} against {what}", reading, data, layout)


def pareto(points: list[Point], sign: int) -> list[Point]:
    """The points that no other one beats in both cost and value, cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -sign * p.value)):
        if not best or sign * point.value > sign * best[-1].value:
            best.append(point)
    return best


def purposes(results: Results) -> Figure | None:
    """What the bytes of all ranks were for, and whether they left their node."""
    sent = {i: totals for i, entry in enumerate(results.entries) if (totals := purpose_bytes(entry))}
    if not sent:
        return None
    rows = {i: row for row, i in enumerate(sent)}
    parts = sorted({part for totals in sent.values() for part in totals}, key=purpose_order)
    data = [_bars(part, sent, rows) for part in parts]
    labels = [label for i in sent for label in _bar_labels(i, results.entries[i].spec, sent[i], rows[i])]
    longest = max(totals.total() for totals in sent.values())
    xaxis = _bytes_axis([0, longest]).layout | {
        "range": [0, longest * 1.2],
        "title": {"text": "bytes sent by all ranks"},
    }
    yaxis = {"visible": False, "range": [len(sent) - 0.5, -0.75], "fixedrange": True}
    layout = _layout(70 + 54 * len(sent), xaxis=xaxis, yaxis=yaxis, barmode="stack", annotations=labels)
    layout["margin"] |= {"l": 16}
    reading = "Full bars left their node, hatched ones stayed inside it; mean over seeds, all ranks together."
    return Figure("purposes", "What the bytes were for", reading, data, layout)


def purpose_bytes(entry: Entry) -> Counter[tuple[str, str]]:
    """Bytes of all ranks at the end of a run by purpose and "inside" or "between" nodes: mean over seeds."""
    total: Counter[tuple[str, str]] = Counter()
    records = [record for record in entry.finished if record.ledger]
    for record in records:
        last = max(row["step"] for row in record.ledger)
        for row in (row for row in record.ledger if row["step"] == last):
            between = row.get("between_bytes", 0)
            total[row["purpose"], "between"] += between
            total[row["purpose"], "inside"] += row["wire_bytes"] - between
    return Counter({part: round(sent / len(records)) for part, sent in total.items() if sent})


def timeline(index: int, entry: Entry) -> Figure | None:
    """A few steps of each rank: above, its computing thread; below, what was on the wire meanwhile."""
    record = next((record for record in entry.finished if record.timeline), None)
    if record is None:
        return None
    ranks = sorted({row["rank"] for row in record.timeline})
    shown = {rank: place for place, rank in enumerate(ranks[:MOST_RANKS])}
    rows = [row for row in record.timeline if row["rank"] in shown]
    end = max(_span(row)[1] for row in rows)
    unit, name = (1.0, "s") if end > 2 else (1e-3, "ms")
    data = [_lane(kind, found, shown, unit) for kind, found in _by_kind(rows).items() if found]
    xaxis = {"title": {"text": f"time ({name})"}, "range": [0, end / unit], "zeroline": False, "automargin": True}
    yaxis = _rank_axis(list(shown))
    marks = _step_marks(rows, shown, unit)
    layout = _layout(84 + 46 * len(shown), xaxis=xaxis, yaxis=yaxis, barmode="overlay", **marks)
    layout["margin"] |= {"t": 26}
    return Figure(f"timeline-{index + 1}", entry.spec, _timeline_words(record, ranks), data, layout)


def _metric(results: Results) -> str:
    return str(results.example["metric"]) if results.example else "loss"


def _epochs(entry: Entry, metric: str) -> list[list[dict[str, Any]]]:
    """Per epoch, the rows of all seeds: only epochs that every seed with curves has."""
    column = f"test_{metric}"
    tables = [
        {row["epoch"]: row | {"value": row[column]} for row in record.metrics if is_number(row.get(column))}
        for record in entry.finished
    ]
    tables = [table for table in tables if table]
    common = set.intersection(*(set(table) for table in tables)) if tables else set()
    return [[table[epoch] for table in tables] for epoch in sorted(common)]


def _curve(i: int, entry: Entry, epochs: list[list[dict[str, Any]]], over: str, axis: Axis, metric: str) -> list[Trace]:
    x = [_mean(row[over] for row in rows) / axis.unit for rows in epochs]
    y = [_mean(row["value"] for row in rows) for rows in epochs]
    line = {"color": colour(i), "width": 2.2, "dash": dash(i)}
    words = [_curve_words(i, entry, rows, metric) for rows in epochs]
    look = {"mode": "lines" if len(x) > 1 else "markers", "line": line, "marker": {"color": colour(i)}}
    trace = {"x": x, "y": y, **look, **_hover(words), "meta": i}
    return [*([_band(i, x, epochs)] if len(epochs[0]) > 1 else []), trace]


def _band(i: int, x: list[float], epochs: list[list[dict[str, Any]]]) -> Trace:
    low, high = ([edge(row["value"] for row in rows) for rows in epochs] for edge in (min, max))
    edges = {"x": x + x[::-1], "y": high + low[::-1], "mode": "lines", "line": {"width": 0}}
    return {**edges, "fill": "toself", "fillcolor": f"{colour(i)}2e", "hoverinfo": "skip", "meta": i}


def _curve_words(i: int, entry: Entry, rows: list[dict[str, Any]], metric: str) -> str:
    seconds, sent = (_mean(row[key] for row in rows) for key in ("train_seconds", "wire_bytes"))
    values = [row["value"] for row in rows]
    seeds = f" ({show(min(values), metric)} to {show(max(values), metric)})" if len(rows) > 1 else ""
    return (
        f"{_name(i, entry)}<br>{metric} {show(_mean(values), metric)}{seeds}<br>"
        f"epoch {rows[0]['epoch']}, {clock(seconds)}, {size(sent)} per rank"
    )


def _target(target: float | None, metric: str) -> dict[str, Any]:
    if target is None:
        return {}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}
    place = {"xref": "paper", "x": 0.01, "y": target, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    words = {"text": f"target {show(target, metric)}", "font": {"size": 11}}
    return {"shapes": [line | {"line": {"color": GREY, "width": 1, "dash": "dot"}}], "annotations": [place | words]}


def _point(i: int, entry: Entry, over: str) -> Point | None:
    cost, value = finite(entry, over), finite(entry, "value")
    return Point(i, cost.mean, value.mean) if cost and value else None


def _front_line(points: list[Point], axis: Axis, metric: str) -> Trace:
    best = pareto(points, better(metric))
    place = {"x": [p.cost / axis.unit for p in best], "y": [p.value for p in best], "mode": "lines"}
    return place | {"line": {"color": GREY, "width": 1.5, "shape": "hv"}, "hoverinfo": "skip"}


def _dot(point: Point, entry: Entry, axis: Axis, metric: str) -> Trace:
    spread = finite(entry, "value")
    deviation = (spread.deviation if spread else None) or 0
    cost = clock(point.cost) if axis.layout["title"]["text"].startswith("training") else size(point.cost)
    words = f"{_name(point.strategy, entry)}<br>{metric} {show(point.value, metric)}<br>{cost}"
    marker = {"symbol": "circle", "size": 21, "line": {"color": colour(point.strategy), "width": 2.2}}
    bar = {"type": "data", "array": [deviation], "color": colour(point.strategy), "thickness": 1.2, "width": 0}
    place = {"x": [point.cost / axis.unit], "y": [point.value], "mode": "markers+text", "cliponaxis": False}
    label = {"text": [str(point.strategy + 1)], "textfont": {"size": 12}, "customdata": [words]}
    hover = {"hovertemplate": "%{customdata}<extra></extra>"}
    return {**place, **label, **hover, "marker": marker, "error_y": bar, "meta": point.strategy}


def purpose_order(part: tuple[str, str]) -> tuple[int, str, str]:
    """Where a purpose, inside or between nodes, stands in a bar and in its key."""
    names = list(PURPOSES)
    return (names.index(part[0]) if part[0] in names else len(names), *part)


def _bars(part: tuple[str, str], sent: dict[int, Counter[tuple[str, str]]], rows: dict[int, int]) -> Trace:
    purpose, where = part
    shade = PURPOSES.get(purpose, GREY)
    pattern = {"shape": "/", "fgcolor": shade, "bgcolor": f"{shade}30", "size": 6, "solidity": 0.35}
    marker = {"color": shade, "line": {"width": 0}} | ({"pattern": pattern} if where == "inside" else {})
    x = [totals[part] for totals in sent.values()]
    words = [f"{escape(purpose)}, {where} nodes: {size(value)}" for value in x]
    place = {"type": "bar", "orientation": "h", "x": x, "y": list(rows.values()), "width": 0.4}
    return {**place, "marker": marker, **_hover(words)}


def _bar_labels(i: int, spec: str, totals: Counter[tuple[str, str]], row: int) -> list[dict[str, Any]]:
    name = f"<b>{i + 1}</b>  {escape(short(spec), quote=False)}"
    left = {"showarrow": False, "xanchor": "left", "align": "left"}
    above = {"x": 0, "y": row, "xref": "paper", "yshift": 20, "text": name, "font": {"size": 12}}
    after = {"x": totals.total(), "y": row, "xshift": 4, "text": size(totals.total()), "font": {"size": 12}}
    return [left | above, left | after]


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What each colour of a timeline stands for; computing is what is left of the steps without waiting."""
    found: dict[str, list[dict[str, Any]]] = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    for step in (row for row in rows if row["kind"] == "step"):
        holes = [_span(row) for row in found["waiting"] if row["rank"] == step["rank"]]
        for begin, end in without(*_span(step), holes):
            found["computing"].append(step | {"begin": begin, "seconds": end - begin, "name": "computing", "bytes": 0})
    return found


def _span(row: dict[str, Any]) -> tuple[float, float]:
    return row["begin"], row["begin"] + row["seconds"]


def without(begin: float, end: float, holes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """A span of time without the holes in it.

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
    return {"type": "bar", "orientation": "h", **bars, **lane, "marker": marker, **_hover(map(_lane_words, rows))}


def _lane_words(row: dict[str, Any]) -> str:
    what = escape(str(row.get("name") or row["kind"]), quote=False)
    what = f"waiting for {what}" if row["kind"] == "waiting" and what != "waiting" else what
    sent = f", {size(row['bytes'])}" if row.get("bytes") else ""
    return f"rank {row['rank']}, step {row['step']}<br>{what}: {clock(row['seconds'])}{sent}"


def _rank_axis(ranks: list[int]) -> dict[str, Any]:
    ticks = {"tickvals": list(range(len(ranks))), "ticktext": [f"rank {rank}" for rank in ranks]}
    look = {"showgrid": False, "zeroline": False, "fixedrange": True, "automargin": True, "ticks": ""}
    return ticks | look | {"range": [len(ranks) - 0.45, -0.55]}


def _step_marks(rows: list[dict[str, Any]], places: dict[int, int], unit: float) -> dict[str, Any]:
    """A line where each step begins, and above the first rank the steps' numbers."""
    steps = [row for row in rows if row["kind"] == "step"]
    lines = []
    for row in steps:
        x, y = row["begin"] / unit, places[row["rank"]]
        line = {"type": "line", "x0": x, "x1": x, "y0": y - 0.44, "y1": y + 0.44}
        lines.append(line | {"line": {"color": GREY, "width": 1}})
    first = [row for row in steps if places[row["rank"]] == 0]
    top = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False, "font": {"size": 11}}
    labels = [top | {"x": row["begin"] / unit, "text": f"step {row['step']}"} for row in first]
    return {"shapes": lines, "annotations": labels if len(labels) <= MOST_STEP_LABELS else []}


def _timeline_words(record: Record, ranks: list[int]) -> str:
    steps = [row["step"] for row in record.timeline]
    some = f" The first {MOST_RANKS} of {len(ranks)} ranks." if len(ranks) > MOST_RANKS else ""
    return f"Steps {min(steps)} to {max(steps)} of seed {record.seed}.{some}"


def _layout(height: int, **more: Any) -> dict[str, Any]:
    common = {"height": height, "showlegend": False, "hovermode": "closest", "autosize": True}
    common |= {"dragmode": False}  # a finger on a figure scrolls the page
    return common | {"margin": {"l": 8, "r": 14, "t": 24, "b": 8}, **more}


def _axis(over: str, values: list[float]) -> Axis | None:
    """None where there is nothing to show: no values, or nothing sent."""
    if not any(values):
        return None
    return _time_axis(values) if over == "train_seconds" else _bytes_axis(values)


def _time_axis(values: list[float]) -> Axis:
    unit, name = next((u, n) for u, n in ((3600.0, "h"), (60.0, "min"), (1.0, "s")) if max(values) > 2 * u or u == 1)
    layout = {"title": {"text": f"training time ({name})"}, "rangemode": "tozero", "zeroline": False}
    return Axis(unit, layout | {"automargin": True})


def _bytes_axis(values: list[float]) -> Axis:
    """Logarithmic where a linear axis would press most of the values against zero."""
    low, high = min(values), max(values)
    layout = {"title": {"text": "bytes sent per rank"}, "automargin": True, "zeroline": False}
    if low > 0 and high > 20 * low:
        layout |= {"type": "log", "title": {"text": "bytes sent per rank (log scale)"}}
        return Axis(1, layout | _ticks(log_ticks(low, high)))
    return Axis(1, layout | {"rangemode": "tozero"} | _ticks(linear_ticks(high)))


def linear_ticks(high: float) -> list[float]:
    """Round numbers from 0 to a little above `high`: at most six of them.

    >>> linear_ticks(6_260_000_000)
    [0, 2000000000, 4000000000, 6000000000, 8000000000]
    """
    power = 10 ** math.floor(math.log10(high))
    step = next(m * power / 10 for m in (1, 2, 5, 10, 20) if 5 * m * power / 10 > high)
    return [round(i * step) for i in range(math.floor(high / step) + 2)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with threefold ones between them where there are few.

    >>> log_ticks(2e6, 4e7)
    [1000000.0, 3000000.0, 10000000.0, 30000000.0, 100000000.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**power for power in powers for m in ((1, 3) if high < 200 * low else (1,))]
    return ticks[: next((i for i, tick in enumerate(ticks) if tick >= high), len(ticks)) + 1]


def _ticks(values: list[float]) -> dict[str, Any]:
    return {"tickvals": values, "ticktext": [re.sub(r"\.0+ ", " ", size(value)) for value in values]}


def _metric_axis(metric: str) -> dict[str, Any]:
    suffix = {"ticksuffix": " %"} if metric == "accuracy" else {}
    return suffix | {"automargin": True, "zeroline": False, "nticks": 7}


def _hover(words: Iterable[str]) -> dict[str, Any]:
    return {"customdata": list(words), "hovertemplate": "%{customdata}<extra></extra>"}


def _name(i: int, entry: Entry) -> str:
    return f"<b>{i + 1}</b> {escape(short(entry.spec, 60), quote=False)}"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
