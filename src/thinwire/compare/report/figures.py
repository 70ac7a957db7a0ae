"""The figures of a report, as plain data for plotly.js; what follows the page's light or dark look is set there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from thinwire.common.formats import format_bytes, format_metric, format_seconds
from thinwire.compare.report.axes import Axis, bytes_axis, linear_bytes, metric_axis, time_axis
from thinwire.compare.report.marks import (
    GREY,
    Figure,
    Trace,
    colour,
    dash,
    hover,
    is_number,
    layout_of,
    mean,
    name_of,
    short,
)
from thinwire.compare.results import Entry, Results
from thinwire.compare.results import Figure as Summarised

PURPOSES = {"train": "#2f78c4", "sync": "#12a07a", "eval": "#c98a0a", "checkpoint": "#c7619f", "start": "#858d97"}


class Point(NamedTuple):
    """A strategy's result: what it cost, and what it reached."""

    strategy: int
    cost: float
    value: float


class _Cost(NamedTuple):
    """What training takes, time or bytes: in a summary, in the metrics of an epoch, in words, and on an axis."""

    name: str
    figure: Summarised
    column: str
    less: str
    axis: Callable[[list[float]], Axis | None]
    form: Callable[[float], str]


class _Drawn(NamedTuple):
    """What all traces of a figure have in common."""

    metric: str
    across: Axis
    up: Axis


def curves(results: Results, over: str) -> Figure | None:
    """The metric over "train_seconds" or "bytes" of training: a mean line in a band from worst to best seed."""
    metric, cost = results.metric, _cost(results, over)
    lines = [(i, entry, _epochs(entry, metric, cost.column)) for i, entry in enumerate(results.entries)]
    rows = [row for _, _, epochs in lines for rows in epochs for row in rows]
    axis = cost.axis([row[cost.column] for row in rows])
    if axis is None:
        return None
    goal = [] if results.target is None else [results.target]
    height = metric_axis(metric, [row["value"] for row in rows] + goal)
    drawn = _Drawn(metric, axis, height)
    data = [trace for i, entry, epochs in lines if epochs for trace in _curve(i, entry, epochs, cost, drawn)]
    layout = layout_of(340, xaxis=axis.layout, yaxis=height.layout) | _target(results.target, drawn)
    side = "Higher" if results.sign > 0 else "Lower"
    band = "A band spans all seeds." if any(len(rows) > 1 for _, _, epochs in lines for rows in epochs) else ""
    reading = f"{side} to the left is better: the same {metric} {cost.less}."
    words = " ".join(filter(None, (reading, band, axis.words)))
    return Figure(f"curve-{over}", f"Test {metric} over {cost.name}", words, data, layout, height.words)


def front(results: Results, over: str) -> Figure | None:
    """Final metric against "train_seconds" or "bytes" of training, with the strategies that none beats in both."""
    metric, cost = results.metric, _cost(results, over)
    points = [point for i, entry in enumerate(results.entries) if (point := _point(i, entry, cost))]
    axis = cost.axis([point.cost for point in points])
    if axis is None:
        return None
    spreads = [(p.value, _deviation(results.entries[p.strategy])) for p in points]
    height = metric_axis(metric, [value + side * by for value, by in spreads for side in (1, -1)])
    drawn = _Drawn(metric, axis, height)
    best = pareto(points, results.sign)
    data = [_front_line(best, drawn), *(_dot(p, results.entries[p.strategy], cost, drawn) for p in points)]
    side = "Up" if results.sign > 0 else "Down"
    unbeaten = "those on the stepped line" if len(best) > 1 else f"number {best[0].strategy + 1}"
    reading = f"{side} and to the left is better: no strategy beats {unbeaten} in both {metric} and {cost.name}."
    bars = (
        "Thin bars are the deviation over seeds." if any(len(entry.finished) > 1 for entry in results.entries) else ""
    )
    layout = layout_of(340, xaxis=axis.layout, yaxis=height.layout)
    words = " ".join(filter(None, (reading, bars, axis.words)))
    return Figure(f"front-{over}", f"Final {metric} against {cost.name}", words, data, layout, height.words)


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
    xaxis = linear_bytes(longest, "bytes sent by all ranks").layout | {"range": [0, longest * 1.2]}
    yaxis = {"visible": False, "range": [len(sent) - 0.5, -0.75], "fixedrange": True}
    layout = layout_of(70 + 54 * len(sent), xaxis=xaxis, yaxis=yaxis, barmode="stack", annotations=labels)
    layout["margin"] |= {"l": 16}
    reading = "Full bars left their node, hatched ones stayed inside it; mean over seeds, all ranks together."
    return Figure("purposes", "What the bytes were for", reading, data, layout)


def purpose_bytes(entry: Entry) -> Counter[tuple[str, str]]:
    """Bytes of all ranks in a whole run by purpose and "inside" or "between" nodes: mean over seeds."""
    total: Counter[tuple[str, str]] = Counter()
    summaries = [record.summary for record in entry.finished if record.summary]
    for summary in summaries:
        for purpose, links in summary["wire_bytes_by_purpose"].items():
            total.update({(purpose, link): count for link, count in links.items()})
    return Counter({part: round(count / len(summaries)) for part, count in total.items() if count})


def _cost(results: Results, over: str) -> _Cost:
    if over == "train_seconds":
        return _Cost("training time", over, over, "after less time", time_axis, format_seconds)
    where, column = (
        ("between nodes", "training_bytes_between") if results.shares_link else ("per rank", "training_bytes")
    )
    name = f"bytes sent {where} in training"
    return _Cost(
        name,
        results.cost,
        column,
        f"for fewer {name}",
        lambda values: bytes_axis(values, f"bytes {where}"),
        format_bytes,
    )


def _epochs(entry: Entry, metric: str, column: str) -> list[list[dict[str, Any]]]:
    """Per epoch, the rows of all seeds: only epochs that every seed with curves has."""
    tables = [
        {row["epoch"]: row | {"value": row[f"test_{metric}"]} for row in record.metrics
         if is_number(row.get(f"test_{metric}")) and is_number(row.get(column))}
        for record in entry.finished
    ]  # fmt: skip
    tables = [table for table in tables if table]
    common = set.intersection(*(set(table) for table in tables)) if tables else set()
    return [[table[epoch] for table in tables] for epoch in sorted(common)]


def _curve(i: int, entry: Entry, epochs: list[list[dict[str, Any]]], cost: _Cost, drawn: _Drawn) -> list[Trace]:
    x = [drawn.across.place(mean(row[cost.column] for row in rows)) for rows in epochs]
    y = [drawn.up.place(mean(row["value"] for row in rows)) for rows in epochs]
    line = {"color": colour(i), "width": 2.2, "dash": dash(i)}
    words = [_curve_words(i, entry, rows, cost, drawn) for rows in epochs]
    look = {"mode": "lines" if len(x) > 1 else "markers", "line": line, "marker": {"color": colour(i)}}
    trace = {"x": x, "y": y, **look, **hover(words), "meta": i}
    return [*([_band(i, x, epochs, drawn)] if len(epochs[0]) > 1 else []), trace]


def _band(i: int, x: list[float], epochs: list[list[dict[str, Any]]], drawn: _Drawn) -> Trace:
    low, high = ([drawn.up.place(edge(row["value"] for row in rows)) for rows in epochs] for edge in (min, max))
    edges = {"x": x + x[::-1], "y": high + low[::-1], "mode": "lines", "line": {"width": 0}}
    return {**edges, "fill": "toself", "fillcolor": f"{colour(i)}2e", "hoverinfo": "skip", "meta": i}


def _curve_words(i: int, entry: Entry, rows: list[dict[str, Any]], cost: _Cost, drawn: _Drawn) -> str:
    values, metric = [row["value"] for row in rows], drawn.metric
    seeds = f" ({format_metric(min(values), metric)} to {format_metric(max(values), metric)})" if len(rows) > 1 else ""
    return (
        f"{name_of(i, entry)}<br>{metric} {format_metric(mean(values), metric)}{seeds}<br>"
        f"epoch {rows[0]['epoch']}, {cost.form(mean(row[cost.column] for row in rows))} {cost.name}"
    )


def _target(target: float | None, drawn: _Drawn) -> dict[str, Any]:
    if target is None:
        return {}
    y = drawn.up.place(target)
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    place = {"xref": "paper", "x": 0.01, "y": y, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    words = {"text": f"target {format_metric(target, drawn.metric)}", "font": {"size": 11}}
    return {"shapes": [line | {"line": {"color": GREY, "width": 1, "dash": "dot"}}], "annotations": [place | words]}


def _point(i: int, entry: Entry, cost: _Cost) -> Point | None:
    spent, value = entry.spread(cost.figure), entry.spread("value")
    return Point(i, spent.mean, value.mean) if spent and value else None


def _deviation(entry: Entry) -> float:
    spread = entry.spread("value")
    return (spread.deviation if spread else None) or 0.0


def _front_line(best: list[Point], drawn: _Drawn) -> Trace:
    place = {"x": [drawn.across.place(p.cost) for p in best], "y": [drawn.up.place(p.value) for p in best]}
    return place | {"mode": "lines", "line": {"color": GREY, "width": 1.5, "shape": "hv"}, "hoverinfo": "skip"}


def _dot(point: Point, entry: Entry, cost: _Cost, drawn: _Drawn) -> Trace:
    deviation, y = _deviation(entry), drawn.up.place(point.value)
    words = f"{name_of(point.strategy, entry)}<br>{drawn.metric} {format_metric(point.value, drawn.metric)}<br>"
    marker = {"symbol": "circle", "size": 21, "line": {"color": colour(point.strategy), "width": 2.2}}
    up, down = (abs(drawn.up.place(point.value + side * deviation) - y) for side in (1, -1))
    bar = {"type": "data", "symmetric": False, "array": [up], "arrayminus": [down]}
    bar |= {"color": colour(point.strategy), "thickness": 1.2, "width": 0}
    place = {"x": [drawn.across.place(point.cost)], "y": [y], "mode": "markers+text", "cliponaxis": False}
    label = {"text": [str(point.strategy + 1)], "textfont": {"size": 12}}
    return {**place, **label, **hover([words + cost.form(point.cost)]), "marker": marker, "error_y": bar,
            "meta": point.strategy}  # fmt: skip


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
    words = [f"{escape(purpose)}, {where} nodes: {format_bytes(value)}" for value in x]
    place = {"type": "bar", "orientation": "h", "x": x, "y": list(rows.values()), "width": 0.4}
    return {**place, "marker": marker, **hover(words)}


def _bar_labels(i: int, spec: str, totals: Counter[tuple[str, str]], row: int) -> list[dict[str, Any]]:
    name = f"<b>{i + 1}</b>  {escape(short(spec), quote=False)}"
    left = {"showarrow": False, "xanchor": "left", "align": "left"}
    above = {"x": 0, "y": row, "xref": "paper", "yshift": 20, "text": name, "font": {"size": 12}}
    after = {"x": totals.total(), "y": row, "xshift": 4, "text": format_bytes(totals.total()), "font": {"size": 12}}
    return [left | above, left | after]
