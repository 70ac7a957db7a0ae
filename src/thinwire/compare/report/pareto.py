"""The figures of the final metric against its cost, with the Pareto front."""

from __future__ import annotations

from typing import NamedTuple

from thinwire.common.formats import format_metric
from thinwire.compare.report.axes import metric_axis
from thinwire.compare.report.costs import Axes, Cost, cost_of
from thinwire.compare.report.style import (
    GREY,
    Figure,
    Trace,
    hover_text,
    layout_of,
    strategy_colour,
    strategy_label,
)
from thinwire.compare.results import Entry, Results


class Point(NamedTuple):
    """A strategy, by its index, with its cost and its final metric: means over seeds."""

    strategy: int
    cost: float
    value: float


def pareto_figure(results: Results, over: str) -> Figure | None:
    """The final metric against the cost "train_seconds" or "bytes": a point per strategy, and the Pareto front."""
    metric, cost = results.metric, cost_of(results, over)
    points = [point for i, entry in enumerate(results.entries) if (point := _point(i, entry, cost))]
    x_axis = cost.make_axis([point.cost for point in points])
    if x_axis is None:
        return None
    spreads = [(p.value, _deviation(results.entries[p.strategy])) for p in points]
    y_axis = metric_axis(metric, [value + side * by for value, by in spreads for side in (1, -1)])
    axes = Axes(metric, x_axis, y_axis)
    front = pareto_front(points, results.sign)
    data = [_front_line(front, axes), *(_point_trace(p, results.entries[p.strategy], cost, axes) for p in points)]
    layout = layout_of(340, xaxis=x_axis.layout, yaxis=y_axis.layout)
    side = "Up" if results.sign > 0 else "Down"
    unbeaten = "the strategies on the stepped line" if len(front) > 1 else f"number {front[0].strategy + 1}"
    reading = f"{side} and to the left is better: no strategy beats {unbeaten} in both {metric} and {cost.name}."
    has_bars = any(len(entry.finished) > 1 for entry in results.entries)
    bars = "Thin bars show the deviation over seeds." if has_bars else ""
    text = " ".join(filter(None, (reading, bars, x_axis.remark)))
    return Figure(f"front-{over}", f"Final {metric} against {cost.name}", text, data, layout, y_axis.remark)


def pareto_front(points: list[Point], sign: int) -> list[Point]:
    """The points that no other point beats in both cost and value, cheapest first; `sign` is +1 if more is better."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -sign * p.value)):
        if not front or sign * point.value > sign * front[-1].value:
            front.append(point)
    return front


def _point(i: int, entry: Entry, cost: Cost) -> Point | None:
    spent, value = entry.spread(cost.measure), entry.spread("value")
    return Point(i, spent.mean, value.mean) if spent and value else None


def _deviation(entry: Entry) -> float:
    spread = entry.spread("value")
    return (spread.deviation if spread else None) or 0.0


def _front_line(front: list[Point], axes: Axes) -> Trace:
    points = {"x": [axes.x.position(p.cost) for p in front], "y": [axes.y.position(p.value) for p in front]}
    return points | {"mode": "lines", "line": {"color": GREY, "width": 1.5, "shape": "hv"}, "hoverinfo": "skip"}


def _point_trace(point: Point, entry: Entry, cost: Cost, axes: Axes) -> Trace:
    """A numbered circle, with a bar for the deviation over seeds."""
    deviation, y = _deviation(entry), axes.y.position(point.value)
    colour = strategy_colour(point.strategy)
    text = f"{strategy_label(point.strategy, entry)}<br>{axes.metric} {format_metric(point.value, axes.metric)}<br>"
    marker = {"symbol": "circle", "size": 21, "line": {"color": colour, "width": 2.2}}
    up, down = (abs(axes.y.position(point.value + side * deviation) - y) for side in (1, -1))
    bar = {"type": "data", "symmetric": False, "array": [up], "arrayminus": [down]}
    bar |= {"color": colour, "thickness": 1.2, "width": 0}
    position = {"x": [axes.x.position(point.cost)], "y": [y], "mode": "markers+text", "cliponaxis": False}
    label = {"text": [str(point.strategy + 1)], "textfont": {"size": 12}}
    return {**position, **label, **hover_text([text + cost.form(point.cost)]), "marker": marker, "error_y": bar,
            "meta": point.strategy}  # fmt: skip
