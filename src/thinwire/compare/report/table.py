"""The tables of the report: a row for each strategy; what cannot be told apart from the best of a column is marked."""

from __future__ import annotations

from typing import NamedTuple

from thinwire.compare.noise import NONE, best_of, noise_of
from thinwire.compare.report.columns import Cell, Column, main_columns, more_columns
from thinwire.compare.report.words import StrategyName, strategy_name
from thinwire.compare.results import Entry, Results


class Row(NamedTuple):
    """A strategy, a remark if some of its runs have not finished, and for each column a cell and whether it is best."""

    name: StrategyName
    remark: str
    cells: list[tuple[Cell, bool]]


class Table(NamedTuple):
    """A table, with the headings of its columns."""

    headings: list[str]
    rows: list[Row]

    @property
    def has_marks(self) -> bool:
        """Is any cell marked as best?"""
        return any(is_best for row in self.rows for _, is_best in row.cells)


class ResultsTable(NamedTuple):
    """The table of the main columns, the table of all others, and how to read them."""

    reading: str
    main: Table
    more: Table


def results_table(results: Results) -> ResultsTable:
    """The tables of a comparison."""
    main, more = (_table(results, columns(results)) for columns in (main_columns, more_columns))
    seeds = max(len(entry.records) for entry in results.entries)
    words = f"Means over seeds, ± deviation over {seeds} seeds." if seeds > 1 else "One seed, so no deviation is known."
    if main.has_marks or more.has_marks:
        words += " Underlined: the best of a column, and whatever these seeds cannot tell apart from it."
        words += " Only bytes are marked, which do not vary by chance." * (seeds == 1)
    return ResultsTable(words, main, more)


def _table(results: Results, columns: list[Column]) -> Table:
    columns = [column for column in columns if any(column.cell(entry) for entry in results.entries)]
    best = [_best(column, results.entries) if results.is_comparable else set() for column in columns]
    rows = []
    for i, entry in enumerate(results.entries):
        done, expected = len(entry.finished), len(entry.records)
        remark = f"{done} of {expected} runs finished" if done < expected else ""
        cells = [(column.cell(entry) or Cell("–"), i in marked) for column, marked in zip(columns, best, strict=True)]
        rows.append(Row(strategy_name(i, entry), remark, cells))
    return Table([column.heading for column in columns], rows)


def _best(column: Column, entries: list[Entry]) -> set[int]:
    """The strategies that cannot be told apart from the best of a column, of those with a value for every seed."""
    found = {i: spread.values for i, entry in enumerate(entries) if (spread := column.values(entry))}
    complete = {i: values for i, values in found.items() if len(values) == len(entries[i].records)}
    if column.better == 0 or len(entries) < 2:
        return set()
    noise = NONE if column.varies == "not" else noise_of(list(found.values()), column.varies == "in proportion")
    return best_of(complete, column.better, noise) if noise else set()
