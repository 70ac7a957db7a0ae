"""The figures of learning curves: the metric after each epoch, over the time or the bytes that training took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thinwire.common.formats import format_metric
from thinwire.compare.report.axes import metric_axis
from thinwire.compare.report.costs import Axes, Cost, cost_of
from thinwire.compare.report.style import (
    GREY,
    Figure,
    Trace,
    hover_text,
    is_number,
    layout_of,
    strategy_colour,
    strategy_dash,
    strategy_label,
)
from thinwire.compare.results import Entry, Results

Epochs = list[list[dict[str, Any]]]  # for each test, mostly after an epoch, the rows of metrics of all seeds


def learning_curves(results: Results, over: str) -> Figure | None:
    """The metric over "train_seconds" or "bytes": a line for the mean over seeds, in a band from worst to best seed."""
    metric, cost = results.metric, cost_of(results, over)
    lines = [(i, entry, _epochs(entry, metric, cost.column)) for i, entry in enumerate(results.entries)]
    rows = [row for _, _, epochs in lines for rows in epochs for row in rows]
    x_axis = cost.make_axis([row[cost.column] for row in rows])
    if x_axis is None:
        return None
    target = [] if results.target is None else [results.target]
    y_axis = metric_axis(metric, [row["value"] for row in rows] + target)
    axes = Axes(metric, x_axis, y_axis)
    data = [trace for i, entry, epochs in lines if epochs for trace in _curve(i, entry, epochs, cost, axes)]
    layout = layout_of(340, xaxis=x_axis.layout, yaxis=y_axis.layout) | _target_line(results.target, axes)
    side = "Higher" if results.sign > 0 else "Lower"
    band = "A band spans all seeds." if any(len(rows) > 1 for _, _, epochs in lines for rows in epochs) else ""
    reading = f"{side} to the left is better: the same {metric} {cost.less}."
    text = " ".join(filter(None, (reading, band, x_axis.remark)))
    return Figure(f"curve-{over}", f"Test {metric} over {cost.name}", text, data, layout, y_axis.remark)


def _epochs(entry: Entry, metric: str, column: str) -> Epochs:
    """The tests that every seed has which recorded any; most are at the end of an epoch."""
    tables = [
        {row["step"]: row | {"value": row[f"test_{metric}"]} for row in record.metrics
         if is_number(row.get(f"test_{metric}")) and is_number(row.get(column))}
        for record in entry.finished
    ]  # fmt: skip
    tables = [table for table in tables if table]
    common = set.intersection(*(set(table) for table in tables)) if tables else set()
    return [[table[step] for table in tables] for step in sorted(common)]


def _curve(i: int, entry: Entry, epochs: Epochs, cost: Cost, axes: Axes) -> list[Trace]:
    x = [axes.x.position(_mean(row[cost.column] for row in rows)) for rows in epochs]
    y = [axes.y.position(_mean(row["value"] for row in rows)) for rows in epochs]
    colour = strategy_colour(i)
    line = {"color": colour, "width": 2.2, "dash": strategy_dash(i)}
    texts = [_point_text(i, entry, rows, cost, axes) for rows in epochs]
    look = {"mode": "lines" if len(x) > 1 else "markers", "line": line, "marker": {"color": colour}}
    trace = {"x": x, "y": y, **look, **hover_text(texts), "meta": i}
    return [*([_band(i, x, epochs, axes)] if len(epochs[0]) > 1 else []), trace]


def _band(i: int, x: list[float], epochs: Epochs, axes: Axes) -> Trace:
    low, high = ([axes.y.position(edge(row["value"] for row in rows)) for rows in epochs] for edge in (min, max))
    edges = {"x": x + x[::-1], "y": high + low[::-1], "mode": "lines", "line": {"width": 0}}
    return {**edges, "fill": "toself", "fillcolor": f"{strategy_colour(i)}2e", "hoverinfo": "skip", "meta": i}


def _point_text(i: int, entry: Entry, rows: list[dict[str, Any]], cost: Cost, axes: Axes) -> str:
    values, metric = [row["value"] for row in rows], axes.metric
    seeds = f" ({format_metric(min(values), metric)} to {format_metric(max(values), metric)})" if len(rows) > 1 else ""
    return (
        f"{strategy_label(i, entry)}<br>{metric} {format_metric(_mean(values), metric)}{seeds}<br>"
        f"epoch {rows[0]['epoch']:g}, {cost.form(_mean(row[cost.column] for row in rows))} {cost.name}"
    )


def _target_line(target: float | None, axes: Axes) -> dict[str, Any]:
    if target is None:
        return {}
    y = axes.y.position(target)
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    position = {"xref": "paper", "x": 0.01, "y": y, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    text = {"text": f"target {format_metric(target, axes.metric)}", "font": {"size": 11}}
    return {"shapes": [line | {"line": {"color": GREY, "width": 1, "dash": "dot"}}], "annotations": [position | text]}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
