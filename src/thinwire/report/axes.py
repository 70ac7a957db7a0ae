"""Axes for time, bytes and metrics, with ticks that people can read."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from thinwire.tables import size


class Axis(NamedTuple):
    """How a quantity is shown: divided by `unit`, on an axis that looks like `layout`."""

    unit: float
    layout: dict[str, Any]


def axis_of(over: str, values: list[float]) -> Axis | None:
    """None where there is nothing to show: no values, or nothing sent."""
    if not any(values):
        return None
    return _time_axis(values) if over == "train_seconds" else bytes_axis(values)


def _time_axis(values: list[float]) -> Axis:
    unit, name = next((u, n) for u, n in ((3600.0, "h"), (60.0, "min"), (1.0, "s")) if max(values) > 2 * u or u == 1)
    layout = {"title": {"text": f"training time ({name})"}, "rangemode": "tozero", "zeroline": False}
    return Axis(unit, layout | {"automargin": True})


def bytes_axis(values: list[float]) -> Axis:
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


def metric_axis(metric: str) -> dict[str, Any]:
    """The axis of a metric."""
    suffix = {"ticksuffix": " %"} if metric == "accuracy" else {}
    return suffix | {"automargin": True, "zeroline": False, "nticks": 7}
