"""The page docs/results.md and its pictures, from docs/results.json."""

from __future__ import annotations

import math
import statistics
from html import escape
from pathlib import Path
from typing import NamedTuple

from cifar10.goals import Line, lines, reference, tried, verdict
from cifar10.results import Results, label
from cifar10.tables import SCALES, SCHEDULE, TABLES, TUNING_IMAGES, Goal, ScaleName, Table
from conditions import where
from floor_render import markdown, with_section

STYLE = """text { font: 13px sans-serif; fill: #333 } .title { font-weight: bold } .axis { stroke: #999 }
.point { fill: #2a78d6 } .sequence { fill: #c2521b } .front { stroke: #2a78d6; opacity: 0.5 }
.number { font-size: 10px; fill: #fff } @media (prefers-color-scheme: dark) {
text { fill: #ddd } .number { fill: #fff } }"""
WIDTH, HEIGHT, LEFT, TOP, ROW = 560, 340, 50, 30, 18  # of the part with points; names are on its right
POINTS = 0.5  # that a row may be below the first one, and still counts as having reached its accuracy
NOT_YET = "not measured yet"


class Axis(NamedTuple):
    """Where values are in a picture: `low` at `begin`, `high` at `end`."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def around(cls, values: list[float], begin: float, end: float) -> Axis:
        """An axis that has all values on it, with a little room."""
        room = 0.05 * (max(values) - min(values)) + 1e-3
        return cls(min(values) - room, max(values) + room, begin, end)

    def at(self, value: float) -> float:
        """The position of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def add_and_draw(results: Results, docs: Path) -> None:
    """Add results to those of the page, and draw it anew."""
    known = Results(docs / "results.json")
    known.add(*results.cells.values())
    draw(docs)


def draw(docs: Path) -> None:
    """Write the sections of results.md, and the pictures, from results.json in the same folder."""
    results, page = Results(docs / "results.json"), docs / "results.md"
    text = page.read_text()
    for scale in SCALES:
        text = with_section(text, f"results-{scale}", section(results, scale))
        for name, table in TABLES.items():
            file = docs / picture_name(scale, name)
            if drawing := picture(results, scale, table):
                file.write_text(drawing)
            else:
                file.unlink(missing_ok=True)
    page.write_text(text)


def picture_name(scale: ScaleName, table: str) -> str:
    """The file of a table's picture."""
    return f"results-{scale}-{table}.svg"


def section(results: Results, scale: ScaleName) -> str:
    """The part of the page for one scale."""
    parts = [about(results, scale)]
    for name, table in TABLES.items():
        parts += [f"### {table.title}", f"```text\n{command(name, scale)}\n```"]
        if picture(results, scale, table):
            parts.append(f"![Accuracy over bytes between nodes: {table.title}]({picture_name(scale, name)})")
        parts.append(markdown(table_cells(results, name, lines(results, scale, table))))
        if scale == "full" and table.goals:
            parts.append("\n".join(["Goals:", "", *(goal_text(results, goal) for goal in table.goals)]))
        if scale == "full" and name != "pareto" and (of_tuning := tried(results, table)):
            parts.append(f"Tried on {TUNING_IMAGES:,} training images that were held out (`--tune`):")
            parts.append(markdown(table_cells(results, name, of_tuning)))
    return "\n\n".join(parts)


def goal_text(results: Results, goal: Goal) -> str:
    """A goal, and for each row that may reach it, whether it does."""
    model = SCALES["full"].models[goal.than.model].name
    return "\n".join([f"- {model}, {goal.text}", *(f"  - {text}" for text in verdict(results, goal))])


def command(table: str, scale: ScaleName) -> str:
    """The command that runs a table."""
    option = "" if scale == "full" else f" --scale {scale}"
    return f"python benchmarks/cifar10/run.py {table}{option} --data DIR --out DIR2"


def about(results: Results, scale: ScaleName) -> str:
    """What was trained, where, and when with which revision."""
    own = SCALES[scale]
    images = f"{own.train:,} training images" if own.train else "All training images"
    tested = f"tested on {own.held_out:,} other training images" if own.held_out else "tested on the test set"
    text = (
        f"{images}, {tested}, once, when training ends; {own.epochs} epochs, batch {own.batch_size} a rank, 4 ranks "
        f"on 2 nodes, `{SCHEDULE}`{', bfloat16 by autocast' if own.autocast else ''}."
    )
    models = {(m.name, m.spec, m.optimizer, m.lr, m.clip_norm): m for m in own.models.values()}.values()
    rows = [[m.name, f"`{m.spec}`", f"`{m.optimizer}`", f"{m.lr:g}", str(m.clip_norm or "–")] for m in models]
    of_page = (one for one in results.cells.values() if one["scale"] == scale and "failed" not in one)
    found = [one for one in of_page if one["held_out"] == own.held_out]  # without those of --tune
    dates = sorted({one["date"] for one in found})
    if found:
        places = sorted({f"{where(one['hardware'])}, torch {one['versions']['torch']}" for one in found})
        span, revisions = " to ".join(dict.fromkeys([dates[0], dates[-1]])), sorted({one["revision"] for one in found})
        measured = f"Measured on {' and '.join(places)}; {span}, at {', '.join(revisions)}."
    else:
        measured = f"At this scale, this is {NOT_YET}."
    heads = ["model", "spec", "optimizer", "learning rate", "clipped at"]
    return "\n\n".join([text, measured, markdown((heads, rows))])


def table_cells(results: Results, name: str, own: list[Line]) -> tuple[list[str], list[list[str]]]:
    """The table of these lines as heads and rows."""
    is_pareto, has_small = name == "pareto", any(one.found and one.ratio > 1 for one in own)
    heads = ["row", "accuracy", "difference", "seeds", "sent by a rank", "between nodes", "share"]
    heads += ["small model"] * has_small + [f"reaches the first − {POINTS}"] * is_pareto + ["time"]
    rows = []
    for i, one in enumerate(own, 1):
        first = f"{i}. {label(one.cell, '`')}"
        if not one.found:
            failed = "failed" in results.cells.get(one.cell.key, {})
            rows.append([first, "failed" if failed else NOT_YET, *[""] * (len(heads) - 2)])
            continue
        than = reference(one, own)
        share = f"{100 * one.between / than.between:.1f} %" if than and than.between else "–"
        cells = [first, accuracy(one), f"{one.accuracy - than.accuracy:+.2f}" if than else "–", str(len(one.found))]
        cells += [gigabytes(one.mean("training_bytes_per_rank")), gigabytes(one.between), share]
        cells += [small_model(one)] * has_small
        if is_pareto:
            is_close = own[0].found and one.accuracy >= own[0].accuracy - POINTS
            cells.append(f"with {gigabytes(one.between)}" if is_close else "no" if own[0].found else "–")
        rows.append([*cells, f"{one.mean('seconds') / 60:.1f} min"])
    return heads, rows


def accuracy(one: Line) -> str:
    """The mean over seeds, with the sample standard deviation."""
    values = [found["accuracy"] for found in one.found]
    return f"{one.accuracy:.2f} %" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def small_model(one: Line) -> str:
    """The size and the accuracy of the small model."""
    found = [cell["small_model"] for cell in one.found if cell["small_model"]]
    if not found:
        return "–"
    size, ratio, value = (statistics.fmean(f[name] for f in found) for name in ("parameters", "ratio", "accuracy"))
    return f"{size / 1e6:.2f} M, {ratio:.1f} : 1, {value:.2f} %"


def gigabytes(num_bytes: float) -> str:
    """Bytes in GB, or in MB if there are few."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def picture(results: Results, scale: ScaleName, table: Table) -> str:
    """Accuracy over bytes between nodes, on a logarithmic axis; points have the numbers of the table's rows.

    Sequences have a colour of their own. If all rows are of one model, a line shows the Pareto front.
    """
    own = [(i, one) for i, one in enumerate(lines(results, scale, table), 1) if one.found and one.between]
    if len(own) < 2:
        return ""
    x = Axis.around([math.log10(one.between) for _, one in own], LEFT, WIDTH - 20)
    y = Axis.around([one.accuracy for _, one in own], HEIGHT - 40, TOP)
    height = max(HEIGHT, TOP + ROW * len(own) + 10)
    parts = [
        f'<text class="title" x="0" y="16">{escape(table.title)}: accuracy in %, over bytes between nodes</text>',
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{HEIGHT - 40}H{WIDTH - 20}"/>',
    ]
    for value in (y.low, (y.low + y.high) / 2, y.high):
        parts.append(f'<text x="{LEFT - 6}" y="{y.at(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    for value in (x.low, (x.low + x.high) / 2, x.high):
        name = gigabytes(10**value)
        anchor = "end" if value == x.high else "middle"
        parts.append(f'<text x="{x.at(value):.1f}" y="{HEIGHT - 20}" text-anchor="{anchor}">{name}</text>')
    if len({one.row.model for _, one in own}) == 1:
        parts.append(front([(one.between, one.accuracy) for _, one in own], x, y))
    for k, (i, one) in enumerate(own):
        left, top = x.at(math.log10(one.between)), y.at(one.accuracy)
        kind = "point sequence" if one.row.strategy.startswith("sequence") else "point"
        parts += [
            f'<circle class="{kind}" cx="{left:.1f}" cy="{top:.1f}" r="8"/>',
            f'<text class="number" x="{left:.1f}" y="{top + 3.5:.1f}" text-anchor="middle">{i}</text>',
            f'<text x="{WIDTH}" y="{TOP + ROW * k + 12}">{i}. {escape(label(one.cell))}</text>',
        ]
    width = WIDTH + 720
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def front(points: list[tuple[float, float]], x: Axis, y: Axis) -> str:
    """A stepped line through the points that no other one beats in both bytes and accuracy."""
    path, best = "", -math.inf
    for between, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if accuracy > best:
            left, top = x.at(math.log10(between)), y.at(accuracy)
            path += f"H{left:.1f}V{top:.1f}" if path else f"M{left:.1f} {top:.1f}"
            best = accuracy
    return f'<path class="front" fill="none" d="{path}"/>'
