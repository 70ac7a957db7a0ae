"""The figures of a report, as plain data for plotly.js; what follows the page's light or dark look is set there."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any, NamedTuple

from thinwire.report.axes import Axis, axis_of, bytes_axis, metric_axis
from thinwire.report.marks import (
    GREY,
    Figure,
    Trace,
    better,
    colour,
    dash,
    hover,
    is_number,
    layout_of,
    mean,
    name_of,
    short,
)
from thinwire.results import Entry, Results
from thinwire.tables import clock, show, size

PURPOSES = {"train": "#2f78c4", "sync": "#12a07a", "eval": "#c98a0a", "checkpoint": "#c7619f", "start": "#858d97"}


class Point(NamedTuple):
    """A strategy's result: what it cost, and what it reached."""

    strategy: int
    cost: float
    value: float


def curves(results: Results, over: str) -> Figure | None:
    """The metric over "train_seconds" or "wire_bytes": a mean line over seeds, in a band from worst to best seed."""
    metric = _metric(results)
    lines = [(i, entry, _epochs(entry, metric)) for i, entry in enumerate(results.entries)]
    axis = axis_of(over, [row[over] for _, _, epochs in lines for rows in epochs for row in rows])
    if axis is None:
        return None
    data = [trace for i, entry, epochs in lines if epochs for trace in _curve(i, entry, epochs, over, axis, metric)]
    layout = layout_of(320, xaxis=axis.layout, yaxis=metric_axis(metric)) | _target(results.target, metric)
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
    axis = axis_of(over, [point.cost for point in points])
    if axis is None:
        return None
    data = [_front_line(points, axis, metric), *(_dot(p, results.entries[p.strategy], axis, metric) for p in points)]
    what = {"train_seconds": "training time", "wire_bytes_per_rank": "bytes sent"}[over]
    side = "Up" if better(metric) > 0 else "Down"
    best = pareto(points, better(metric))
    unbeaten = "those on the stepped line" if len(best) > 1 else f"number {best[0].strategy + 1}"
    reading = (
        f"{side} and to the left is better: no strategy beats {unbeaten} in both {metric} and {what}."
        + " Thin bars are the deviation over seeds." * any(len(entry.finished) > 1 for entry in results.entries)
    )
    layout = layout_of(320, xaxis=axis.layout, yaxis=metric_axis(metric))
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
    xaxis = bytes_axis([0, longest]).layout | {
        "range": [0, longest * 1.2],
        "title": {"text": "bytes sent by all ranks"},
    }
    yaxis = {"visible": False, "range": [len(sent) - 0.5, -0.75], "fixedrange": True}
    layout = layout_of(70 + 54 * len(sent), xaxis=xaxis, yaxis=yaxis, barmode="stack", annotations=labels)
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
    x = [mean(row[over] for row in rows) / axis.unit for rows in epochs]
    y = [mean(row["value"] for row in rows) for rows in epochs]
    line = {"color": colour(i), "width": 2.2, "dash": dash(i)}
    words = [_curve_words(i, entry, rows, metric) for rows in epochs]
    look = {"mode": "lines" if len(x) > 1 else "markers", "line": line, "marker": {"color": colour(i)}}
    trace = {"x": x, "y": y, **look, **hover(words), "meta": i}
    return [*([_band(i, x, epochs)] if len(epochs[0]) > 1 else []), trace]


def _band(i: int, x: list[float], epochs: list[list[dict[str, Any]]]) -> Trace:
    low, high = ([edge(row["value"] for row in rows) for rows in epochs] for edge in (min, max))
    edges = {"x": x + x[::-1], "y": high + low[::-1], "mode": "lines", "line": {"width": 0}}
    return {**edges, "fill": "toself", "fillcolor": f"{colour(i)}2e", "hoverinfo": "skip", "meta": i}


def _curve_words(i: int, entry: Entry, rows: list[dict[str, Any]], metric: str) -> str:
    seconds, sent = (mean(row[key] for row in rows) for key in ("train_seconds", "wire_bytes"))
    values = [row["value"] for row in rows]
    seeds = f" ({show(min(values), metric)} to {show(max(values), metric)})" if len(rows) > 1 else ""
    return (
        f"{name_of(i, entry)}<br>{metric} {show(mean(values), metric)}{seeds}<br>"
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
    cost, value = entry.spread(over), entry.spread("value")
    return Point(i, cost.mean, value.mean) if cost and value else None


def _front_line(points: list[Point], axis: Axis, metric: str) -> Trace:
    best = pareto(points, better(metric))
    place = {"x": [p.cost / axis.unit for p in best], "y": [p.value for p in best], "mode": "lines"}
    return place | {"line": {"color": GREY, "width": 1.5, "shape": "hv"}, "hoverinfo": "skip"}


def _dot(point: Point, entry: Entry, axis: Axis, metric: str) -> Trace:
    spread = entry.spread("value")
    deviation = (spread.deviation if spread else None) or 0
    cost = clock(point.cost) if axis.layout["title"]["text"].startswith("training") else size(point.cost)
    words = f"{name_of(point.strategy, entry)}<br>{metric} {show(point.value, metric)}<br>{cost}"
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
    return {**place, "marker": marker, **hover(words)}


def _bar_labels(i: int, spec: str, totals: Counter[tuple[str, str]], row: int) -> list[dict[str, Any]]:
    name = f"<b>{i + 1}</b>  {escape(short(spec), quote=False)}"
    left = {"showarrow": False, "xanchor": "left", "align": "left"}
    above = {"x": 0, "y": row, "xref": "paper", "yshift": 20, "text": name, "font": {"size": 12}}
    after = {"x": totals.total(), "y": row, "xshift": 4, "text": size(totals.total()), "font": {"size": 12}}
    return [left | above, left | after]
