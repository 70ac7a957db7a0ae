"""What all figures share: colours, names and the frame that plotly.js draws in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from thinwire.compare.results import Entry

Trace = dict[str, Any]
# Okabe and Ito's colours for all kinds of sight, shifted to stand out from white and from black alike.
COLOURS = ("#2f78c4", "#e0662b", "#12a07a", "#c7619f", "#c98a0a", "#3a9fd3", "#858d97", "#9a9210")
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#858d97"


@dataclass(frozen=True)
class Figure:
    """One figure: its place on the page, its words, and what plotly.js draws."""

    name: str
    title: str
    reading: str
    data: list[Trace]
    layout: dict[str, Any]
    scale: str = ""  # what a reader must know of its vertical axis


def colour(index: int) -> str:
    """The colour of a strategy in every figure."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """The kind of line of a strategy: solid until the colours are used up."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def short(spec: str, most: int = 46) -> str:
    """A spec that fits; both ends are kept because they tell strategies apart.

    >>> short("data_parallel(reducer=topk(ratio=0.01))", 20)
    'data_paral…io=0.01))'
    """
    half = most // 2
    return spec if len(spec) <= most else f"{spec[:half]}…{spec[half + 1 - most :]}"


def is_number(value: Any) -> bool:
    """Is it there, and finite? A run that diverges records NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


def layout_of(height: int, **more: Any) -> dict[str, Any]:
    """The layout that all figures begin with."""
    common = {"height": height, "showlegend": False, "hovermode": "closest", "autosize": True}
    common |= {"dragmode": False}  # a finger on a figure scrolls the page
    return common | {"margin": {"l": 8, "r": 14, "t": 24, "b": 8}, **more}


def hover(words: Iterable[str]) -> dict[str, Any]:
    """What is shown beside the pointer, for each point."""
    return {"customdata": list(words), "hovertemplate": "%{customdata}<extra></extra>"}


def name_of(i: int, entry: Entry) -> str:
    """A strategy's number and name, for labels."""
    return f"<b>{i + 1}</b> {escape(short(entry.spec, 60), quote=False)}"


def mean(values: Iterable[float]) -> float:
    """The mean of some numbers."""
    found = list(values)
    return sum(found) / len(found)
