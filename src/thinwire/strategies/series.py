"""Series: how the report shows what a strategy reports of itself."""

from __future__ import annotations

from typing import Literal, NamedTuple

Draw = Literal["lines", "heatmap", "column"]


class Series(NamedTuple):
    """How the report shows one value of `status()`, which is recorded after each epoch.

    draw="lines": a number, or a list or dict of numbers, over epochs. It is drawn only if one of them changes.
    draw="heatmap": {row: [part, whole]}, a row of cells for each, coloured by part/whole. If `status` has a "phase",
    each cell names it.
    draw="column": [number, reference], the last one as a column of the results table, with its ratio.
    """

    title: str
    draw: Draw
    about: str  # how to read it
    row: str = "row"  # of a heatmap: what each row stands for
    cell: str = "value"  # of a heatmap: what is counted; of a column: what the reference is
