"""The parts of sequences: what each of them reached, sent and took."""

from __future__ import annotations

from typing import Any, NamedTuple

from thinwire.common.formats import format_metric, format_seconds
from thinwire.compare.report.costs import cost_of
from thinwire.compare.results import Entry, Record, Results


class PartRow(NamedTuple):
    """A part of a sequence, in words."""

    number: int
    strategy: str
    epochs: str  # "1 to 18"
    value: str  # the metric at its end
    sent: str  # in training
    seconds: str


def part_rows(results: Results, entry: Entry) -> list[PartRow]:
    """The parts of a strategy's first finished run; none if it is no sequence."""
    record = next((record for record in entry.finished if any("part" in row for row in record.metrics)), None)
    return [] if record is None else _rows(results, record)


def _rows(results: Results, record: Record) -> list[PartRow]:
    cost, metric = cost_of(results, "bytes"), results.metric
    before: dict[str, Any] = {cost.column: 0, "train_seconds": 0.0, "epoch": 0}
    rows = []
    after_epochs = [row for row in record.metrics if "part" in row]
    for number in sorted({row["part"] for row in after_epochs}):
        last = next(row for row in reversed(after_epochs) if row["part"] == number)
        tested = last.get(f"test_{metric}")
        rows.append(
            PartRow(
                number, last["part_strategy"], f"{before['epoch'] + 1} to {last['epoch']}",
                "not tested" if tested is None else format_metric(tested, metric),
                cost.form(last[cost.column] - before[cost.column]),
                format_seconds(last["train_seconds"] - before["train_seconds"]),
            )
        )  # fmt: skip
        before = last
    return rows
