"""The columns of the report's tables: what each cell says of a strategy, and the values that it is compared by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from thinwire.comm.ledger import TRAINING
from thinwire.common.formats import format_bytes, format_count, format_metric
from thinwire.compare.report.series import declared_series, series_of
from thinwire.compare.results import Entry, Measure, Results, Spread, sent, spread
from thinwire.compare.verdicts import baseline_specs, is_unequal, speed_against, times
from thinwire.run.schema import SeriesSummary
from thinwire.run.tables import number_and_reference

OTHER_PURPOSES = ("start", "eval", "checkpoint")  # than training


class Cell(NamedTuple):
    """The text of a cell; `notes` are smaller lines below it, and `is_mean` says that the best are underlined."""

    text: str
    notes: tuple[str, ...] = ()
    is_mean: bool = False


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    cell: Callable[[Entry], Cell | None]
    values: Callable[[Entry], Spread | None] = lambda entry: None  # to compare strategies by
    better: int = 0  # +1 if higher values are better, −1 if lower ones are, 0 if neither
    varies: Literal["not", "evenly", "in proportion"] = "not"  # from seed to seed


def main_columns(results: Results) -> list[Column]:
    """The columns that most readers want."""
    metric, target = results.metric, results.target
    reached = f"Time to {format_metric(target, metric)} (s)" if target is not None else ""
    where = "between nodes" if results.shares_link else "per rank"
    return [
        _metric_column(results, "Final", "value"),
        _column("Training time (s)", "train_seconds", _seconds, -1, "in proportion", deviation=True),
        *(_speed_column(results, spec) for spec in baseline_specs(results)),
        Column(reached, lambda e: _to_target(e, target), lambda e: _all_reached(e, target), -1, "in proportion"),
        _column(f"Sent in training, {where}", results.cost, format_bytes, -1),
        _column("Waiting (%)", "waiting_share", lambda share: f"{100 * share:.1f}", -1, "evenly"),
        *_work_columns(results, True),
    ]


def more_columns(results: Results) -> list[Column]:
    """All other columns."""
    link, where = ("between", "between nodes") if results.shares_link else (None, "per rank")
    return [
        _metric_column(results, "Best", "best"),
        *_work_columns(results, False),
        _column("Samples per s", "samples_per_second", lambda speed: f"{speed:,.0f}", 1, "in proportion"),
        _column("Peak memory", "peak_memory_bytes", format_bytes, -1, "in proportion"),
        *([_column("Sent in training, inside nodes", sent(TRAINING, "inside"), format_bytes, 0)] if link else []),
        _column(f"Sent otherwise, {where}", sent(OTHER_PURPOSES, link), format_bytes, 0),
        _column(f"Sent in all, {where}", sent(None, link), format_bytes, -1),
        Column("In all between nodes, by Linux", _kernel_cell),
        *_artifact_columns(results),
        *_series_columns(results),
    ]


# ---- columns of a measure


def _column(
    heading: str, measure: Measure, form: Callable[[float], str], better: int,
    varies: Literal["not", "evenly", "in proportion"] = "not", *, deviation: bool = False,
) -> Column:  # fmt: skip
    """The mean of a measure over seeds, and if wanted its deviation."""

    def values(entry: Entry) -> Spread | None:
        return entry.spread(measure)

    def cell(entry: Entry) -> Cell | None:
        found = values(entry)
        return _mean_cell(found, form, len(entry.finished), deviation) if found else None

    return Column(heading, cell, values, better, varies)


def _mean_cell(values: Spread, form: Callable[[float], str], runs: int, deviation: bool) -> Cell:
    notes = [f"± {form(values.deviation)}"] if deviation and values.deviation is not None else []
    notes += [f"{len(values.values)} of {runs} seeds"] if len(values.values) < runs else []
    return Cell(form(values.mean), tuple(notes), is_mean=True)


def _metric_column(results: Results, which: str, measure: Measure) -> Column:
    metric = results.metric

    def value(number: float) -> str:
        return format_metric(number, metric).removesuffix(" %")

    heading = f"{which} {metric}{' (%)' if metric == 'accuracy' else ''}"
    return _column(heading, measure, value, results.sign, "evenly", deviation=True)


def _speed_column(results: Results, spec: str) -> Column:
    def cell(entry: Entry) -> Cell | None:
        factor = speed_against(results, entry, spec)
        return Cell(times(factor), is_mean=True) if factor else None

    return Column(f"×\u00a0{spec}", cell)


def _work_columns(results: Results, unequal: bool) -> list[Column]:
    """Updates and samples: those that differ between strategies, or those that do not."""
    columns = {"steps": "Updates", "samples": "Samples"}
    return [
        _column(heading, key, lambda count: f"{count:,.0f}", 0)
        for key, heading in columns.items()
        if is_unequal(results, key) == unequal
    ]


def _to_target(entry: Entry, target: float | None) -> Cell | None:
    if target is None or not entry.finished:
        return None
    reached = entry.seconds_to(target)
    return _mean_cell(reached, _seconds, len(entry.finished), True) if reached else Cell("", ("not reached",))


def _all_reached(entry: Entry, target: float | None) -> Spread | None:
    """The times to the target, if every seed reached it: only then they can be compared."""
    reached = entry.seconds_to(target) if target is not None else None
    return reached if reached and len(reached.values) == len(entry.finished) else None


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


# ---- other columns


def _kernel_cell(entry: Entry) -> Cell | None:
    """Bytes between nodes as the Linux kernel counted them, and by how much that differs from the ledger."""
    runs = [summary for record in entry.finished if (summary := record.summary) and summary["kernel_bytes_by_link"]]
    kernel = spread([float(run["kernel_bytes_by_link"].get("between", 0)) for run in runs])
    ledger = spread([float((run["wire_bytes_by_link"] or {}).get("between", 0)) for run in runs])
    if kernel is None or ledger is None:
        return None
    difference = f"{100 * (kernel.mean / ledger.mean - 1):+.1f} %".replace("-", "−") if ledger.mean else ""
    return Cell(format_bytes(kernel.mean), (difference,) if difference else ())


def _artifact_columns(results: Results) -> list[Column]:
    """A column for each kind of artifact that declares a heading."""
    headings = dict.fromkeys(
        one["column"] for entry in results.entries for one in artifacts_of(entry) if one["column"]
    )  # fmt: skip
    return [Column(heading, lambda entry, heading=heading: _artifact_cell(entry, heading)) for heading in headings]  # type: ignore[misc]


def artifacts_of(entry: Entry) -> list[dict[str, Any]]:
    """The artifacts of a strategy's finished runs."""
    return [one for r in entry.finished if (summary := r.summary) for one in summary.get("artifacts", [])]


def _artifact_cell(entry: Entry, heading: str) -> Cell | None:
    """The size of an artifact, and the ratio of the whole model's parameters to its own: means over seeds."""
    found = [one for one in artifacts_of(entry) if one["column"] == heading]
    if not found:
        return None
    num_bytes, ratio = (sum(one[key] for one in found) / len(found) for key in ("bytes", "ratio"))
    return Cell(format_bytes(num_bytes), (f"{ratio:.1f} : 1",))


def _series_columns(results: Results) -> list[Column]:
    """A column for each series that is drawn as a column."""
    return [
        Column(series.title, partial(_series_cell, name, series))
        for name, series in declared_series(results)
        if series.draw == "column"
    ]


def _series_cell(name: str, series: SeriesSummary, entry: Entry) -> Cell | None:
    """The last number of the first seed that has one, and its ratio to the reference."""
    pairs = (number_and_reference(record.summary, name) for record in entry.finished if record.summary)
    found = next((pair for pair in pairs if pair), None)
    if series_of(entry).get(name) != series or found is None:
        return None
    number, reference = found
    return Cell(format_count(number), (f"{number / reference:.2f} × {series.cell}",))
