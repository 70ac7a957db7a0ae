"""The figure of a series that is drawn as a heatmap: a row for each part of the value, a column for each epoch."""

from __future__ import annotations

import math
from html import escape
from typing import Any, NamedTuple

from thinwire.compare.report.axes import linear_ticks
from thinwire.compare.report.style import Figure, Trace, layout_of, short
from thinwire.compare.results import Entry, Record
from thinwire.run.schema import SeriesSummary

# One hue from light to dark; both ends stand out from a white and from a black page.
SCALE = [[0.0, "#b9d7f4"], [0.25, "#86b5e6"], [0.5, "#5590d0"], [0.75, "#2f6db1"], [1.0, "#1b4a82"]]
MIN_ROW, MAX_ROW, LABEL = 15, 30, 12  # pixels of a row and of its name
USUAL_HEIGHT, MAX_HEIGHT = 420, 800  # pixels of all rows: at the first they begin to shrink, the second is the most
MAX_GAPS = 60  # with more rows or columns there are no gaps between them
MIN_NAME, MAX_NAME = 24, 36  # characters of a row's name: as few as keep names different; more do not fit on a phone


class Cell(NamedTuple):
    """A part and its whole in some epoch, and the phase of the strategy."""

    part: int
    whole: int
    phase: str

    @property
    def share(self) -> float:
        return 100 * self.part / self.whole


History = dict[int, dict[str, Cell]]  # of a run: by epoch and row


def heatmap(name: str, series: SeriesSummary, i: int, entry: Entry) -> Figure | None:
    """The shares part/whole after each epoch of the first finished seed that has some."""
    found = next(((record, history) for record in entry.finished if (history := _history(record, name))), None)
    if found is None:
        return None
    record, history = found
    rows = list(dict.fromkeys(row for cells in history.values() for row in cells))
    epochs = _columns(history)
    height = min(MAX_HEIGHT, max(MIN_ROW * len(rows), min(MAX_ROW * len(rows), USUAL_HEIGHT)))
    ticks = sorted(set(linear_ticks(epochs[-1])))
    look = {"showgrid": False, "zeroline": False, "automargin": True}
    xaxis = look | {"title": {"text": "epoch"}, "tickvals": ticks, "range": [epochs[0] - 0.5, epochs[-1] + 0.5]}
    yaxis = look | _row_axis(rows, height)
    layout = layout_of(height + 92, xaxis=xaxis, yaxis=yaxis, minreducedheight=10)
    layout["margin"] |= {"t": 44}
    data = [_map(history, rows, epochs, series)]
    reading = _reading(record, history, series)
    return Figure(f"series-{name}-{i + 1}", f"{series.title}, {entry.name}", reading, data, layout)


def _history(record: Record, name: str) -> History:
    """The pairs (part, whole) that a run recorded under a name; other values are left out."""
    history: History = {}
    for line in record.metrics:
        found, phase = line.get(name), line.get("phase")
        cells = {
            row: Cell(pair[0], pair[1], phase if isinstance(phase, str) else "")
            for row, pair in (found.items() if isinstance(found, dict) else ())
            if _is_pair(pair)
        }
        if cells and _is_count(line.get("epoch")):
            history[line["epoch"]] = cells
    return history


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) and pair[0] <= pair[1]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 10**9


def _columns(history: History) -> list[int]:
    """The epochs in order, with an empty one beside each gap, so that plotly does not widen the others."""
    first, last = min(history), max(history)
    return sorted({near for epoch in history for near in range(epoch - 1, epoch + 2) if first <= near <= last})


def _map(history: History, rows: list[str], epochs: list[int], series: SeriesSummary) -> Trace:
    cells = [[history.get(epoch, {}).get(row) for epoch in epochs] for row in rows]
    shares = [[cell and cell.share for cell in line] for line in cells]
    words = [
        [_cell_text(row, epoch, cell, series) if cell else "" for epoch, cell in zip(epochs, line, strict=True)]
        for row, line in zip(rows, cells, strict=True)
    ]
    gaps = {"xgap": int(len(epochs) <= MAX_GAPS), "ygap": int(len(rows) <= MAX_GAPS)}
    place = {"type": "heatmap", "x": epochs, "y": list(range(len(rows))), "z": shares, "zmin": 0, "zmax": 100}
    look = {"colorscale": SCALE, "colorbar": _colour_bar(series.cell), **gaps}
    hover = {"text": words, "hovertemplate": "%{text}<extra></extra>", "hoverongaps": False}
    return place | look | hover


def _cell_text(row: str, epoch: int, cell: Cell, series: SeriesSummary) -> str:
    name, phase = escape(short(row, 60), quote=False), escape(cell.phase, quote=False)
    share = escape(f"{series.cell} {cell.part} of {cell.whole} ({cell.share:.0f} %)", quote=False)
    return f"{escape(series.row, quote=False)} {name}, epoch {epoch}: {share}" + (f", phase {phase}" if phase else "")


def _colour_bar(cell: str) -> dict[str, Any]:
    """Above the rows: beside one or two rows there is no room for it."""
    place = {"orientation": "h", "xref": "container", "x": 0, "xanchor": "left", "xpad": 30}
    place |= {"yref": "container", "y": 1, "yanchor": "top", "ypad": 4}
    extent = {"lenmode": "pixels", "len": 260, "thickness": 9, "outlinewidth": 0}
    ticks = {
        "tickvals": [0, 50, 100],
        "ticktext": [escape(f"{cell} 0 %", quote=False), "50 %", "100 % of the largest"],
        "tickangle": 0,
    }
    return place | extent | ticks | {"ticklabeloverflow": "allow"}


def _row_axis(rows: list[str], height: int) -> dict[str, Any]:
    """The first row on top; as many names as there is room for."""
    every = math.ceil(LABEL * len(rows) / height)
    names = [escape(name, quote=False) for name in _short_names(rows)]
    ticks = {"tickvals": list(range(len(rows)))[::every], "ticktext": names[::every], "ticks": ""}
    look = {"tickfont": {"family": "monospace", "size": 11}, "fixedrange": True}
    return ticks | look | {"range": [len(rows) - 0.5, -0.5]}


def _short_names(rows: list[str]) -> list[str]:
    """Long names without the modules that all of them are in, cut in the middle.

    >>> _short_names(["encoder.rows.0.self_attention", "encoder.rows.1.self_attention"])
    ['…0.self_attention', '…1.self_attention']
    """
    names = rows
    while max(map(len, rows)) > MIN_NAME and len({name.partition(".")[:2] for name in names}) == 1 < len(rows):
        names = [name.partition(".")[2] for name in names]
    names = [f"…{name}" for name in names] if names != rows else rows
    tries = ([short(name, most) for name in names] for most in range(MIN_NAME, MAX_NAME + 1))
    return next((found for found in tries if len(set(found)) == len(found)), [short(name, MAX_NAME) for name in names])


def _reading(record: Record, history: History, series: SeriesSummary) -> str:
    last = history[max(history)]
    low = sum(cell.part < cell.whole for cell in last.values())
    which = {0: f"no {series.row}", len(last): f"every {series.row}"}.get(low, f"{low} of {len(last)} {series.row}s")
    return f"After epoch {max(history)} of seed {record.seed}, {which} had less than full {series.cell}."
