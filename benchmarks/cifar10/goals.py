"""What the results say: means over seeds, differences to the row that a row is compared with, and goals reached."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from cifar10.cells import Cell
from cifar10.results import Results, label
from cifar10.tables import SCALES, Goal, Row, ScaleName, Table
from conditions import Found

MOST_SEEDS = 10  # that the page looks for


class Line(NamedTuple):
    """The results of one row: the finished cells of all its seeds."""

    row: Row
    cell: Cell  # of the first seed
    found: list[Found]  # empty: not measured yet

    def mean(self, name: str) -> float:
        """The mean of a number over seeds."""
        return statistics.fmean(one[name] for one in self.found)

    @property
    def accuracy(self) -> float:
        return self.mean("accuracy")

    @property
    def between(self) -> float:
        return self.mean("training_bytes_between")

    @property
    def ratio(self) -> float:
        """Parameters of the whole model ÷ those of the small one; 1 for a seed without one."""
        return statistics.fmean(one["small_model"]["ratio"] if one["small_model"] else 1.0 for one in self.found)

    @property
    def small_accuracy(self) -> float:
        """The accuracy of the small model; of the whole one for a seed without one."""
        return statistics.fmean((one["small_model"] or one)["accuracy"] for one in self.found)


def line(results: Results, scale: ScaleName, row: Row, tune: bool = False) -> Line:
    """The results of a row at the scale's length, of all seeds that there are; with `tune` those of --tune."""
    epochs = SCALES[scale].epochs
    by_seed = {seed: Cell(scale, row, seed, epochs, tune) for seed in range(MOST_SEEDS)}
    found = [one for cell in by_seed.values() if (one := results.finished(cell))]
    return Line(row, by_seed[0], found)


def lines(results: Results, scale: ScaleName, table: Table) -> list[Line]:
    """The lines of a table."""
    return [line(results, scale, row) for row in table.rows]


def tried(results: Results, table: Table) -> list[Line]:
    """The rows and candidates of a table that were tried on held-out training images."""
    found = (line(results, "full", row, tune=True) for row in table.rows + table.candidates)
    return [one for one in found if one.found]


def reference(own: Line, of_table: list[Line]) -> Line | None:
    """The first line of the same model, if both are measured and it is another one."""
    first = next(one for one in of_table if one.row.model == own.row.model)  # of --tune: the first one that was tried
    return first if first is not own and first.found and own.found else None


def verdict(results: Results, goal: Goal) -> list[str]:
    """For each row that may reach a goal: whether it does, and by how much."""
    than = line(results, "full", goal.than)
    found = [line(results, "full", row) for row in goal.rows]
    return [f"{_verdict(goal, own, than)}: {label(own.cell, '`').partition(': ')[2]}" for own in found]


def _verdict(goal: Goal, own: Line, than: Line) -> str:
    needs_other = goal.points is not None or goal.sent is not None
    if not own.found or (needs_other and not than.found):
        return "not measured yet"
    reached, texts = [], []
    if goal.points is not None:
        difference = (own.accuracy if goal.ratio is None else own.small_accuracy) - than.accuracy
        reached.append(difference >= -goal.points)
        texts.append(f"{difference:+.2f} points")
    if goal.accuracy is not None:
        reached.append(own.accuracy >= goal.accuracy)
        texts.append(f"{own.accuracy:.2f} %, error {100 - own.accuracy:.2f} %")
    if goal.sent is not None:
        share = own.mean("training_bytes_per_rank") / than.mean("training_bytes_per_rank")
        reached.append(share <= goal.sent)
        texts.append(f"{100 * share:.1f} % of the bytes, {100 * own.between / than.between:.1f} % between nodes")
    if goal.ratio is not None:
        reached.append(own.ratio >= goal.ratio)
        texts.append(f"{own.ratio:.1f} : 1")
    seeds = "1 seed" if len(own.found) == 1 else f"{len(own.found)} seeds"
    return f"**{'reached' if all(reached) else 'not reached'}** ({', '.join(texts)}; {seeds})"
