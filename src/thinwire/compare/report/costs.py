"""The two costs of training that figures are drawn over: time, and bytes sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from thinwire.common.formats import format_bytes, format_seconds
from thinwire.compare.report.axes import PlotAxis, bytes_axis, time_axis
from thinwire.compare.results import Measure, Results


class Cost(NamedTuple):
    """A cost of training: where to find it, and how to write and draw it."""

    name: str
    measure: Measure  # in the summary of a run
    column: str  # in the metrics of an epoch
    less: str  # "for less of it", in words
    make_axis: Callable[[list[float]], PlotAxis | None]
    form: Callable[[float], str]


class Axes(NamedTuple):
    """The axes of a figure that draws a metric over a cost."""

    metric: str
    x: PlotAxis
    y: PlotAxis


def cost_of(results: Results, over: str) -> Cost:
    """The cost "train_seconds" or "bytes"."""
    if over == "train_seconds":
        return Cost("training time", over, over, "after less time", time_axis, format_seconds)
    where, column = "per rank", "training_bytes"
    if results.shares_link:
        where, column = "between nodes", "training_bytes_between"
    name = f"bytes sent {where} in training"

    def make_axis(values: list[float]) -> PlotAxis | None:
        return bytes_axis(values, f"bytes {where}")

    return Cost(name, results.cost, column, f"for fewer {name}", make_axis, format_bytes)
