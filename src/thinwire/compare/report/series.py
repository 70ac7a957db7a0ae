"""What strategies report of themselves, drawn as they declare it: see strategies/series.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from thinwire.compare.report.axes import linear_ticks
from thinwire.compare.report.heatmap import heatmap
from thinwire.compare.report.style import Figure, layout_of, strategy_colour, strategy_dash
from thinwire.compare.results import Entry, Record, Results
from thinwire.run.schema import SeriesSummary
from thinwire.strategies.series import Draw


def declared_series(results: Results) -> list[tuple[str, SeriesSummary]]:
    """The series that strategies of a comparison declare, each with the name of its value in `status`, once."""
    found: list[tuple[str, SeriesSummary]] = []
    for entry in results.entries:
        found += [pair for pair in series_of(entry).items() if pair not in found]
    return found


def series_of(entry: Entry) -> dict[str, SeriesSummary]:
    """The series of one strategy; runs of earlier versions declare none."""
    summaries = (record.summary for record in entry.finished if record.summary)
    declared: dict[str, Any] = next((summary["series"] for summary in summaries if summary.get("series")), {})
    return {name: SeriesSummary(**about) for name, about in declared.items()}


def series_figures(name: str, series: SeriesSummary, results: Results) -> Iterator[tuple[int, Entry, Figure]]:
    """A figure for each strategy that declares this series, if there is something to draw."""
    if series.draw not in FIGURES:
        return
    for i, entry in enumerate(results.entries):
        figure = FIGURES[series.draw](name, series, i, entry) if series_of(entry).get(name) == series else None
        if figure is not None:
            yield i, entry, figure


def lines(name: str, series: SeriesSummary, i: int, entry: Entry) -> Figure | None:
    """Each number over epochs, of the first finished seed in which one of them changes."""
    for record in entry.finished:
        history = _history(record, name)
        if any(len(set(points.values())) > 1 for points in history.values()):
            data = [
                {"type": "scatter", "mode": "lines+markers", "x": list(points), "y": list(points.values()),
                 "name": escape(key, quote=False),
                 "line": {"color": strategy_colour(k), "dash": strategy_dash(k)}}
                for k, (key, points) in enumerate(history.items())
            ]  # fmt: skip
            last = max(epoch for points in history.values() for epoch in points)
            xaxis = {"title": {"text": "epoch"}, "tickvals": sorted(set(linear_ticks(last)))}
            layout = layout_of(300, xaxis=xaxis, yaxis={"title": {"text": escape(series.title, quote=False)}}) | {
                "showlegend": True
            }
            return Figure(
                f"series-{name}-{i + 1}", f"{series.title}, {entry.name}", f"Seed {record.seed}.", data, layout
            )
    return None


def _history(record: Record, name: str) -> dict[str, dict[int, float]]:
    """For each line, by name, its numbers by epoch."""
    history: dict[str, dict[int, float]] = {}
    for row in record.metrics:
        value = row.get(name)
        parts = value if isinstance(value, dict) else dict(enumerate(value if isinstance(value, list) else [value]))
        for key, number in parts.items():
            if _is_number(number) and _is_number(row.get("epoch")):
                history.setdefault(str(key), {})[row["epoch"]] = number
    return history


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


FIGURES: dict[Draw, Callable[[str, SeriesSummary, int, Entry], Figure | None]] = {"lines": lines, "heatmap": heatmap}
