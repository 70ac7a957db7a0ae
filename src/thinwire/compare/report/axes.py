"""The axes of figures for time, bytes and metrics, with round numbers as ticks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from thinwire.common.formats import format_bytes

ERROR_SCALE_ABOVE = 90.0  # per cent: if an accuracy is higher, accuracies may be drawn by their errors,
ERROR_SCALE_RATIO = 4.0  # if the lowest accuracy has at least so many times the errors of the highest


class PlotAxis(NamedTuple):
    """An axis of a figure."""

    position: Callable[[float], float]  # of a value, in the units of plotly's axis
    layout: dict[str, Any]  # plotly's settings
    remark: str = ""  # a sentence for the reader, if the axis is unusual


def time_axis(values: list[float]) -> PlotAxis | None:
    """Training time from 0; None if all values are 0."""
    if not any(values):
        return None
    unit, name = next((u, n) for u, n in ((3600.0, "h"), (60.0, "min"), (1.0, "s")) if max(values) > 2 * u or u == 1)
    layout = {"title": {"text": f"training time ({name})"}, "rangemode": "tozero", "zeroline": False}
    return PlotAxis(lambda seconds: seconds / unit, layout | {"automargin": True})


def bytes_axis(values: list[float], title: str) -> PlotAxis | None:
    """Bytes: linear, or logarithmic if the values differ by more than a factor of ten; None if nothing was sent."""
    some = [value for value in values if value > 0]
    if not some:
        return None
    low, high = min(some), max(some)
    if high <= 10 * low:
        return linear_bytes(high, title)
    ticks = log_ticks(low, high)
    zero = [ticks[0] / 3] if min(values) == 0 else []
    layout = {"title": {"text": f"{title} (log scale)"}, "automargin": True, "zeroline": False, "type": "log"}
    marks = {"tickvals": [*zero, *ticks], "ticktext": ["0"] * len(zero) + _sizes(ticks)}
    edges = [math.log10(min(zero + some)) - 0.08, math.log10(high) + 0.08]
    remark = "On this log scale 0 is drawn at the left edge." if zero else ""
    return PlotAxis(lambda count: max([count, *zero]), layout | marks | {"range": edges}, remark)


def linear_bytes(high: float, title: str) -> PlotAxis:
    """Bytes from 0 to at least `high`, linear."""
    ticks = linear_ticks(high)
    layout = {"title": {"text": title}, "automargin": True, "zeroline": False, "rangemode": "tozero"}
    return PlotAxis(float, layout | {"tickvals": ticks, "ticktext": _sizes(ticks)})


def linear_ticks(high: float) -> list[float]:
    """At most six round numbers, from 0 to a little above `high`.

    >>> linear_ticks(6_260_000_000)
    [0, 2000000000, 4000000000, 6000000000, 8000000000]
    """
    power = 10 ** math.floor(math.log10(high))
    step = next(m * power / 10 for m in (1, 2, 5, 10, 20) if 5 * m * power / 10 > high)
    return [round(i * step) for i in range(math.floor(high / step) + 2)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`; if there are few, also three times each power.

    >>> log_ticks(2e6, 4e7)
    [1000000.0, 3000000.0, 10000000.0, 30000000.0, 100000000.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**power for power in powers for m in ((1, 3) if high < 200 * low else (1,))]
    return ticks[: next((i for i, tick in enumerate(ticks) if tick >= high), len(ticks)) + 1]


def _sizes(values: list[float]) -> list[str]:
    return [re.sub(r"\.0+ ", " ", format_bytes(value)) for value in values]


def metric_axis(metric: str, values: list[float]) -> PlotAxis:
    """The axis of a metric; accuracies near 100 % are drawn by their errors on a log scale, to separate them."""
    low, high = min(values), max(values)
    if (
        metric == "accuracy"
        and high > ERROR_SCALE_ABOVE
        and high > low
        and 100 - low >= ERROR_SCALE_RATIO * (100 - high)
    ):
        return _error_axis(low, values)
    room = max(0.06 * (high - low), 0.002 * abs(high), 1e-6)
    begin = low - room
    layout: dict[str, Any] = {"automargin": True, "zeroline": False, "nticks": 7}
    layout |= {"ticksuffix": " %"} if metric == "accuracy" else {}
    if begin <= 0.1 * high:
        return PlotAxis(float, layout | {"range": [0, high + room]})
    return PlotAxis(float, layout | {"range": [begin, high + room]}, f"The {metric} axis does not begin at 0.")


def _error_axis(low: float, values: list[float]) -> PlotAxis:
    """−log₁₀(100 − accuracy), with accuracies as ticks; 100 % is drawn where half of the fewest errors would be."""
    fewest = min((100 - value for value in values if value < 100), default=1.0)
    floor = fewest / 2 if max(values) >= 100 else fewest

    def position(accuracy: float) -> float:
        return -math.log10(max(100 - accuracy, floor))

    begin, end = position(low), -math.log10(floor)
    room = 0.05 * (end - begin)
    ticks = error_ticks(fewest, 100 - low)
    labels = {position(100 - error): f"{100 - error:.4g} %" for error in ticks} | (
        {end: "100 %"} if floor < fewest else {}
    )
    layout = {"automargin": True, "zeroline": False, "range": [begin - room, end + room]}
    layout |= {"tickvals": list(labels), "ticktext": list(labels.values())}
    remark = "The accuracy axis does not begin at 0. Each step up on it halves the errors."
    return PlotAxis(position, layout, remark)


def error_ticks(fewest: float, most: float) -> list[float]:
    """About four to seven round error rates from `most` down to `fewest`, in per cent.

    >>> error_ticks(1.5, 70)
    [50.0, 20.0, 10.0, 5.0, 2.0]
    """
    steps = (5, 2, 1) if most > 10 * fewest else (7, 5, 4, 3, 2, 1.5, 1)
    powers = range(math.ceil(math.log10(most)), math.floor(math.log10(fewest)) - 1, -1)
    return [tick for power in powers for step in steps if fewest <= (tick := round(step * 10.0**power, 9)) <= most]
