"""The figures of a plan's page: seconds per epoch against the speed of the link, and against ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.advice.crossings import link_text, speed_text
from thinwire.advice.curves import RankCurves, RateCurves
from thinwire.advice.own_runs import OwnRun
from thinwire.advice.plan_table import seconds_text
from thinwire.compare.report.style import (
    GREY,
    Figure,
    Trace,
    hover_text,
    label_of,
    layout_of,
    strategy_colour,
    strategy_dash,
)
from thinwire.compare.report.words import pluralize
from thinwire.netlab.link import Link
from thinwire.plan.planner import Forecast

SPEEDS = {1.0: "1 M", 10.0: "10 M", 100.0: "100 M", 1e3: "1 G", 1e4: "10 G", 1e5: "100 G"}  # ticks, in Mbit/s
TICKS = {
    1e-6: "1 µs", 1e-5: "10 µs", 1e-4: "100 µs", 1e-3: "1 ms", 1e-2: "10 ms", 0.1: "100 ms", 1.0: "1 s", 10.0: "10 s",
    60.0: "1 min", 600.0: "10 min", 3600.0: "1 h", 36e3: "10 h", 86_400 * 4.0: "4 days", 86_400 * 40.0: "40 days",
    86_400 * 365.0: "1 year",
}  # fmt: skip
MORE_TICKS = {
    3e-6: "3 µs", 3e-5: "30 µs", 3e-4: "300 µs", 3e-3: "3 ms", 3e-2: "30 ms", 0.3: "300 ms", 3.0: "3 s", 30.0: "30 s",
    180.0: "3 min", 1800.0: "30 min", 10_800.0: "3 h", 86_400.0: "1 day",
}  # fmt: skip
FEW_TICKS = 4
MARGIN = {"l": 8, "r": 26, "t": 24, "b": 8}  # room for the last tick's label


def rate_figure(curves: RateCurves, links: Sequence[Link], runs: Sequence[OwnRun]) -> Figure:
    """A line for each strategy against the speed of the link, and a point for each run that lies on such a line."""
    lines = [_line(i, spec, {r: curves.at(spec, r) for r in curves.rates}, speed_text)
             for i, spec in enumerate(curves.specs)]  # fmt: skip
    points = [_point(curves.specs.index(run.strategy), run) for run in runs if run.is_on_curve]
    latency = links[0].latency_ms
    shown = [
        one.rate_mbit for one in links if one.latency_ms == latency and min(SPEEDS) <= one.rate_mbit <= max(SPEEDS)
    ]
    x_axis = _log_axis("link speed (bit/s, log scale)", list(SPEEDS), list(SPEEDS.values()), list(SPEEDS))
    layout = layout_of(
        440, margin=MARGIN, xaxis=x_axis, yaxis=_time_axis([*lines, *points]), shapes=[_marker(rate) for rate in shown]
    )
    reading = f"Lower is better. Messages take {latency:g} ms." if latency else "Lower is better."
    reading += " Dotted: the links of the plan." * bool(shown)
    reading += " Diamonds are your own runs, as they were measured." * bool(points)
    return Figure("rates", "Seconds per epoch by the speed of the link", reading, [*lines, *points], layout)


def rank_figure(curves: RankCurves) -> Figure:
    """A line for each strategy against the number of ranks."""

    def text(ranks: float) -> str:
        count = int(ranks)
        return f"{pluralize(count, 'rank')} on {pluralize(curves.nodes[count], 'node')}"

    lines = [
        _line(i, spec, dict(sorted(found.items())), text, "lines+markers")
        for i, (spec, found) in enumerate(curves.forecasts.items())
    ]
    ranks = list(curves.nodes)
    x_axis = _log_axis("ranks (log scale)", ranks, [str(count) for count in ranks], ranks)
    layout = layout_of(400, margin=MARGIN, xaxis=x_axis, yaxis=_time_axis(lines))
    reading = f"Lower is better. Each node has a link of {link_text(curves.link)}, and as many ranks as in the plan."
    reading += " On one node nothing passes a link." * (1 in curves.nodes.values())
    if curves.left_out:
        reading += " Where a strategy has no point, it cannot train on so many ranks, or the time for curves was over."
    return Figure("ranks", "Seconds per epoch by the number of ranks", reading, lines, layout)


def _line(
    i: int, spec: str, found: Mapping[float, Forecast] | Mapping[int, Forecast], where: Callable[[float], str],
    mode: str = "lines",
) -> Trace:  # fmt: skip
    texts = [
        f"{label_of(i, spec)}<br>{where(x)}<br>an epoch {seconds_text(f.seconds_per_epoch)}, "
        f"waiting {f.waiting_share:.0%}"
        for x, f in found.items()
    ]
    colour = strategy_colour(i)
    return {
        "x": list(found), "y": [f.seconds_per_epoch for f in found.values()], "mode": mode, "meta": i,
        "line": {"color": colour, "width": 2.2, "dash": strategy_dash(i)}, "marker": {"color": colour, "size": 6},
        **hover_text(texts),
    }  # fmt: skip


def _point(i: int, run: OwnRun) -> Trace:
    text = (
        f"{label_of(i, run.strategy)}<br>your run at {speed_text(run.rate_mbit)}<br>an epoch "
        f"{seconds_text(run.measured)}, predicted {seconds_text(run.predicted)}"
    )
    marker = {"symbol": "diamond", "size": 11, "color": strategy_colour(i), "line": {"color": GREY, "width": 1.5}}
    return {"x": [run.rate_mbit], "y": [run.measured], "mode": "markers", "marker": marker, "meta": i,
            "cliponaxis": False, **hover_text([text])}  # fmt: skip


def _marker(rate: float) -> dict[str, Any]:
    line = {"color": GREY, "width": 1, "dash": "dot"}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": rate, "x1": rate, "line": line}


def _time_axis(traces: Sequence[Trace]) -> dict[str, Any]:
    values = [seconds for trace in traces for seconds in trace["y"] if seconds > 0] or [1.0]
    low, high = min(values) / 1.15, max(values) * 1.15
    shown = {tick: text for tick, text in TICKS.items() if low <= tick <= high}
    if len(shown) < FEW_TICKS:
        shown |= {tick: text for tick, text in MORE_TICKS.items() if low <= tick <= high}
    if not shown:
        shown = {math.sqrt(low * high): seconds_text(math.sqrt(low * high))}
    return _log_axis("an epoch takes (log scale)", list(shown), list(shown.values()), [low, high])


def _log_axis(title: str, ticks: Sequence[float], texts: Sequence[str], values: Sequence[float]) -> dict[str, Any]:
    edges = [math.log10(min(values)) - 0.03, math.log10(max(values)) + 0.03]
    return {
        "title": {"text": title}, "type": "log", "automargin": True, "zeroline": False, "range": edges,
        "tickvals": list(ticks), "ticktext": list(texts),
    }  # fmt: skip
