"""The import graph as a picture: boxes in rows, each above all that it imports."""

from __future__ import annotations

from itertools import pairwise

BOX, ROW, GAP, HEIGHT = 104, 74, 22, 32  # width of a box, from row to row, between two boxes, height of a box

Node = str | tuple[str, str, int]  # a layer, or the place where an arrow passes through a row: (from, to, row)


def picture(arrows: dict[str, list[str]]) -> str:
    """An SVG of a graph without circles; it follows the reader's choice of light or dark."""
    paths = [path for one, others in arrows.items() for path in _paths(one, others, _rows(arrows))]
    rows = _ordered(_rows(arrows), paths)
    width = max(_width(row) for row in rows) + 2 * GAP
    x = {node: width / 2 + shift for row in rows for node, shift in zip(row, _shifts(row), strict=True)}
    y = {node: GAP + ROW * depth for depth, row in enumerate(reversed(rows)) for node in row}
    lines = [_curve([(x[node], y[node]) for node in path]) for path in paths]
    boxes = [
        f'<rect x="{x[one] - BOX / 2:g}" y="{y[one]:g}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
        f'<text x="{x[one]:g}" y="{y[one] + HEIGHT / 2 + 4.5:g}">{one}</text>'
        for one in arrows
    ]
    height = ROW * (len(rows) - 1) + HEIGHT + 2 * GAP
    return "\n".join([HEAD.format(width=width, height=height), *lines, *boxes, "</svg>", ""])


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"
  viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif" font-size="13">
<style>
rect {{ fill: #e3f1ef; stroke: #00857a }} text {{ fill: #1c2b2a; text-anchor: middle }}
path {{ fill: none; stroke: #7a8a89; stroke-width: 1.3; marker-end: url(#tip) }}
marker path {{ fill: #7a8a89; marker-end: none }}
@media (prefers-color-scheme: dark) {{ rect {{ fill: #12332f; stroke: #3aa69a }} text {{ fill: #dce9e7 }} }}
</style>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 8 4 0 8z"/></marker>"""


def _rows(arrows: dict[str, list[str]]) -> dict[str, int]:
    """The row of each layer, from below: one above the highest that it imports."""
    rows: dict[str, int] = {}

    def row(one: str) -> int:
        if one not in rows:
            rows[one] = max((row(other) + 1 for other in arrows[one]), default=0)
        return rows[one]

    for one in arrows:
        row(one)
    return rows


def _paths(one: str, others: list[str], rows: dict[str, int]) -> list[list[Node]]:
    """The arrows of a layer, each as the nodes that it passes, from above."""
    return [
        [one, *((one, other, row) for row in range(rows[one] - 1, rows[other], -1)), other] for other in sorted(others)
    ]


def _ordered(rows: dict[str, int], paths: list[list[Node]]) -> list[list[Node]]:
    """The nodes of each row, from below, so that arrows are short: each goes to the middle of its neighbours."""
    placed: list[list[Node]] = [[] for _ in range(max(rows.values()) + 1)]
    for node in dict.fromkeys([*rows, *(node for path in paths for node in path)]):
        placed[rows[node] if isinstance(node, str) else node[2]].append(node)
    beside: dict[Node, list[Node]] = {node: [] for row in placed for node in row}
    for path in paths:
        for upper, lower in pairwise(path):
            beside[upper].append(lower)
            beside[lower].append(upper)
    for _ in range(24):
        for row in (*placed, *reversed(placed)):
            at = {node: shift for nodes in placed for node, shift in zip(nodes, _shifts(nodes), strict=True)}
            row.sort(key=lambda node: sum(at[other] for other in beside[node]) / len(beside[node]))
    return placed


def _width(row: list[Node]) -> float:
    return sum(BOX if isinstance(node, str) else 0 for node in row) + GAP * (len(row) - 1)


def _shifts(row: list[Node]) -> list[float]:
    """How far right of the middle each node of a row is."""
    shifts, left = [], -_width(row) / 2
    for node in row:
        size = BOX if isinstance(node, str) else 0
        shifts.append(left + size / 2)
        left += size + GAP
    return shifts


def _curve(points: list[tuple[float, float]]) -> str:
    """A line from the lower edge of the first box to the upper edge of the last, through the rows between them."""
    d = f"M{points[0][0]:g} {points[0][1] + HEIGHT:g}"
    for (x0, y0), (x1, y1) in pairwise(points):
        start = y0 + HEIGHT
        d += f"L{x0:g} {start:g}C{x0:g} {(start + y1) / 2:g} {x1:g} {(start + y1) / 2:g} {x1:g} {y1:g}"
    return f'<path d="{d}"/>'
