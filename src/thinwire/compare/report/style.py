"""The style that all figures share: colours, lines, labels, and the layout that each figure begins with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from thinwire.compare.results import Entry

Trace = dict[str, Any]
# Okabe and Ito's colours, which colour-blind readers can tell apart, shifted to stand out from white and from black.
COLOURS = ("#2f78c4", "#e0662b", "#12a07a", "#c7619f", "#c98a0a", "#3a9fd3", "#858d97", "#9a9210")
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#858d97"
# The colours of the page, by the name of their CSS variable.
LIGHT = {"page": "#ffffff", "text": "#1d2126", "muted": "#59626d", "line": "#dde1e6", "panel": "#f5f6f8",
         "note": "#fff6e3", "edge": "#c98a0a"}  # fmt: skip
DARK = {"page": "#14171b", "text": "#e4e8ec", "muted": "#9da7b3", "line": "#30363e", "panel": "#1c2026",
        "note": "#2a2416", "edge": "#b98612"}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A drawing on the page: its texts, and the data and layout that plotly.js draws it from."""

    name: str  # the id of its HTML element
    title: str
    reading: str  # a sentence on how to read it
    data: list[Trace]
    layout: dict[str, Any]
    scale: str = ""  # a sentence on its vertical axis, if that is unusual


def strategy_colour(index: int) -> str:
    """The colour of a strategy in every figure."""
    return COLOURS[index % len(COLOURS)]


def strategy_dash(index: int) -> str:
    """The line style of a strategy: solid until the colours are used up."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def short(spec: str, most: int = 46) -> str:
    """A spec cut to `most` characters in the middle: strategies often differ at their ends.

    >>> short("data_parallel(reducer=topk(ratio=0.01))", 20)
    'data_paral…io=0.01))'
    """
    half = most // 2
    return spec if len(spec) <= most else f"{spec[:half]}…{spec[half + 1 - most :]}"


def is_number(value: Any) -> bool:
    """Is this a finite number? A run that diverges records NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


def layout_of(height: int, **more: Any) -> dict[str, Any]:
    """The layout that every figure begins with; `more` is added to it."""
    common = {"height": height, "showlegend": False, "hovermode": "closest", "autosize": True}
    common |= {"dragmode": False}  # on a touch screen, dragging scrolls the page
    return common | {"margin": {"l": 8, "r": 14, "t": 24, "b": 8}, **more}


def hover_text(texts: Iterable[str]) -> dict[str, Any]:
    """The text that each point of a trace shows under the pointer."""
    return {"customdata": list(texts), "hovertemplate": "%{customdata}<extra></extra>"}


def strategy_label(i: int, entry: Entry) -> str:
    """A strategy's number and name, for hover texts."""
    return label_of(i, entry.name)


def label_of(i: int, spec: str) -> str:
    """The same for the strategy with this number and spec."""
    return f"<b>{i + 1}</b> {escape(short(spec, 60), quote=False)}"
