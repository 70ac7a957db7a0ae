"""The rank of each layer over time, drawn, for strategies that factor layers."""

from __future__ import annotations

import math
from html import escape
from typing import Any, NamedTuple

from thinwire.compare.report.axes import linear_ticks
from thinwire.compare.report.marks import Figure, Trace, layout_of, short
from thinwire.compare.results import Entry, Record

# One hue from light to dark, and neither so light nor so dark that it is lost on a white or on a black page.
SCALE = [[0.0, "#b9d7f4"], [0.25, "#86b5e6"], [0.5, "#5590d0"], [0.75, "#2f6db1"], [1.0, "#1b4a82"]]
LEAST_ROW, MOST_ROW, LABEL = 15, 30, 12  # pixels of a layer and of its name
USUAL_HEIGHT, MOST_HEIGHT = 420, 800  # pixels of all layers: where rows begin to shrink, and where they have to
MOST_FRAMED = 60  # rows or columns that are set apart by a line
LEAST_NAME, MOST_NAME = 24, 36  # letters of a layer's name: as few as tell all apart, and room left on a phone


class Cell(NamedTuple):
    """The rank of a layer in some epoch, the largest that it could have, and what the strategy was doing."""

    rank: int
    largest: int
    phase: str

    @property
    def share(self) -> float:
        return 100 * self.rank / self.largest


History = dict[int, dict[str, Cell]]  # of a run: by epoch and layer


def ranks(i: int, entry: Entry) -> Figure | None:
    """The rank of each layer after each epoch of the first seed that has some, as a share of the largest possible."""
    found = next(((record, history) for record in entry.finished if (history := _history(record))), None)
    if found is None:
        return None
    record, history = found
    layers = list(dict.fromkeys(layer for cells in history.values() for layer in cells))
    epochs = _columns(history)
    height = min(MOST_HEIGHT, max(LEAST_ROW * len(layers), min(MOST_ROW * len(layers), USUAL_HEIGHT)))
    ticks = sorted(set(linear_ticks(epochs[-1])))
    look = {"showgrid": False, "zeroline": False, "automargin": True}
    xaxis = look | {"title": {"text": "epoch"}, "tickvals": ticks, "range": [epochs[0] - 0.5, epochs[-1] + 0.5]}
    yaxis = look | _layer_axis(layers, height)
    layout = layout_of(height + 92, xaxis=xaxis, yaxis=yaxis, minreducedheight=10)
    layout["margin"] |= {"t": 44}
    data = [_map(history, layers, epochs)]
    return Figure(f"ranks-{i + 1}", f"Rank of each layer, {entry.spec}", _rank_words(record, history), data, layout)


def _history(record: Record) -> History:
    """What a run recorded of its ranks, without what is none."""
    history: History = {}
    for row in record.metrics:
        found, phase = row.get("ranks"), row.get("phase")
        cells = {
            layer: Cell(pair[0], pair[1], phase if isinstance(phase, str) else "")
            for layer, pair in (found.items() if isinstance(found, dict) else ())
            if _is_rank(pair)
        }
        if cells and _is_count(row.get("epoch")):
            history[row["epoch"]] = cells
    return history


def _is_rank(pair: Any) -> bool:
    """A rank, and the largest one possible?"""
    return isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) and pair[0] <= pair[1]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 10**9


def _columns(history: History) -> list[int]:
    """The epochs in order, with an empty one beside each hole: the others then keep their width."""
    first, last = min(history), max(history)
    return sorted({near for epoch in history for near in range(epoch - 1, epoch + 2) if first <= near <= last})


def _map(history: History, layers: list[str], epochs: list[int]) -> Trace:
    cells = [[history.get(epoch, {}).get(layer) for epoch in epochs] for layer in layers]
    shares = [[cell and cell.share for cell in row] for row in cells]
    words = [
        [_cell_words(layer, epoch, cell) if cell else "" for epoch, cell in zip(epochs, row, strict=True)]
        for layer, row in zip(layers, cells, strict=True)
    ]
    gaps = {"xgap": int(len(epochs) <= MOST_FRAMED), "ygap": int(len(layers) <= MOST_FRAMED)}
    place = {"type": "heatmap", "x": epochs, "y": list(range(len(layers))), "z": shares, "zmin": 0, "zmax": 100}
    look = {"colorscale": SCALE, "colorbar": _colour_bar(), **gaps}
    hover = {"text": words, "hovertemplate": "%{text}<extra></extra>", "hoverongaps": False}
    return place | look | hover


def _cell_words(layer: str, epoch: int, cell: Cell) -> str:
    name, phase = escape(short(layer, 60), quote=False), escape(cell.phase, quote=False)
    rank = f"rank {cell.rank} of {cell.largest} ({cell.share:.0f} %)"
    return f"layer {name}, epoch {epoch}: {rank}" + (f", phase {phase}" if phase else "")


def _colour_bar() -> dict[str, Any]:
    """Lying above the layers: beside one or two there is no room for it."""
    place = {"orientation": "h", "xref": "container", "x": 0, "xanchor": "left", "xpad": 30}
    place |= {"yref": "container", "y": 1, "yanchor": "top", "ypad": 4}
    extent = {"lenmode": "pixels", "len": 260, "thickness": 9, "outlinewidth": 0}
    ticks = {"tickvals": [0, 50, 100], "ticktext": ["rank 0 %", "50 %", "100 % of the largest"], "tickangle": 0}
    return place | extent | ticks | {"ticklabeloverflow": "allow"}


def _layer_axis(layers: list[str], height: int) -> dict[str, Any]:
    """The first layer on top; as many names as there is room for."""
    every = math.ceil(LABEL * len(layers) / height)
    names = [escape(name, quote=False) for name in _short_names(layers)]
    ticks = {"tickvals": list(range(len(layers)))[::every], "ticktext": names[::every], "ticks": ""}
    look = {"tickfont": {"family": "monospace", "size": 11}, "fixedrange": True}
    return ticks | look | {"range": [len(layers) - 0.5, -0.5]}


def _short_names(layers: list[str]) -> list[str]:
    """Long names without the modules that all of them are in, and without their middle.

    >>> _short_names(["encoder.layers.0.self_attention", "encoder.layers.1.self_attention"])
    ['…0.self_attention', '…1.self_attention']
    """
    names = layers
    while max(map(len, layers)) > LEAST_NAME and len({name.partition(".")[:2] for name in names}) == 1 < len(layers):
        names = [name.partition(".")[2] for name in names]
    names = [f"…{name}" for name in names] if names != layers else layers
    tries = ([short(name, most) for name in names] for most in range(LEAST_NAME, MOST_NAME + 1))
    return next((found for found in tries if len(set(found)) == len(found)), [short(name, MOST_NAME) for name in names])


def _rank_words(record: Record, history: History) -> str:
    last = history[max(history)]
    low = sum(cell.rank < cell.largest for cell in last.values())
    which = {0: "no layer", len(last): "every layer that can be factored"}.get(low, f"{low} of {len(last)} layers")
    return f"After epoch {max(history)} of seed {record.seed}, {which} had less than full rank."
