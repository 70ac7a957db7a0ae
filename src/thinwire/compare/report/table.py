"""The tables of a report: a row for each strategy, what cannot be told apart from the best of a column underlined."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, Literal, NamedTuple

from thinwire.comm.ledger import TRAINING
from thinwire.common.formats import format_bytes, format_count, format_metric
from thinwire.compare.noise import NONE, best_of, noise_of
from thinwire.compare.report.render import spec_of
from thinwire.compare.report.series import declared_series, series_of
from thinwire.compare.results import Entry, Measure, Results, Spread, sent, spread
from thinwire.compare.verdicts import baselines, is_unequal, speed, times

OTHERWISE = ("start", "eval", "checkpoint")  # purposes


class Column(NamedTuple):
    """A column: what a cell says, the values behind it, which way is better (0: neither), how seeds change them."""

    heading: str
    cell: Callable[[Entry], str | None]
    values: Callable[[Entry], Spread | None] = lambda entry: None
    better: int = 0
    varies: Literal["not", "evenly", "in proportion"] = "not"


def results_table(results: Results) -> str:
    """The table of what matters most, how to read it, and the other figures folded away."""
    seeds = max(len(entry.records) for entry in results.entries)
    main, found = _table(results, _columns(results), "results")
    more, found_more = _table(results, _more_columns(results), "more")
    words = f"Means over seeds, ± deviation over {seeds} seeds." if seeds > 1 else "One seed, so no deviation is known."
    if found or found_more:
        words += " Underlined: the best of a column, and whatever these seeds cannot tell apart from it."
        words += " Only bytes are marked, which do not vary by chance." * (seeds == 1)
    return f"""<h2 id="results">Results</h2><p>{words}</p>
{main}<details class="fold"><summary id="more">More figures</summary>{more}</details>"""


def _table(results: Results, columns: list[Column], name: str) -> tuple[str, bool]:
    """A table that may scroll, and whether anything in it is marked."""
    columns = [column for column in columns if any(column.cell(entry) for entry in results.entries)]
    heads = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    best = [_best(column, results.entries) for column in columns]
    rows = "".join(_row(i, e, columns, [i in b for b in best]) for i, e in enumerate(results.entries))
    table = f"""<p class="hint" hidden>This table is wider than the page: scroll it sideways →</p>
<div class="wide" role="region" aria-labelledby="{name}" tabindex="0"><table>
<thead><tr><th scope="col">Strategy</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"""
    return table, any(best)


def _columns(results: Results) -> list[Column]:
    """What most readers want to know."""
    metric, target = results.metric, results.target
    reached = f"Time to {format_metric(target, metric)} (s)" if target is not None else ""
    where = "between nodes" if results.shares_link else "per rank"
    return [
        _metric_column(results, "Final", "value"),
        _column("Training time (s)", "train_seconds", _seconds, -1, "in proportion", deviation=True),
        *(_speed_column(baseline) for baseline in baselines(results)),
        Column(reached, lambda e: _to_target(e, target), lambda e: _all_reached(e, target), -1, "in proportion"),
        _column(f"Sent in training, {where}", results.cost, format_bytes, -1),
        _column("Waiting (%)", "waiting_share", lambda share: f"{100 * share:.1f}", -1, "evenly"),
        *_work_columns(results, True),
    ]


def _more_columns(results: Results) -> list[Column]:
    link, where = ("between", "between nodes") if results.shares_link else (None, "per rank")
    return [
        _metric_column(results, "Best", "best"),
        *_work_columns(results, False),
        _column("Samples per s", "samples_per_second", lambda speed: f"{speed:,.0f}", 1, "in proportion"),
        _column("Peak memory", "peak_memory_bytes", format_bytes, -1, "in proportion"),
        *([_column("Sent in training, inside nodes", sent(TRAINING, "inside"), format_bytes, 0)] if link else []),
        _column(f"Sent otherwise, {where}", sent(OTHERWISE, link), format_bytes, 0),
        _column(f"Sent in all, {where}", sent(None, link), format_bytes, -1),
        Column("In all between nodes, by kernel", _kernel),
        *_artifact_columns(results),
        *_series_columns(results),
    ]


def _metric_column(results: Results, which: str, measure: Measure) -> Column:
    metric = results.metric

    def value(number: float) -> str:
        return format_metric(number, metric).removesuffix(" %")

    heading = f"{which} {metric}{' (%)' if metric == 'accuracy' else ''}"
    return _column(heading, measure, value, results.sign, "evenly", deviation=True)


def _speed_column(baseline: Entry) -> Column:
    def cell(entry: Entry) -> str | None:
        factor = speed(entry, baseline)
        return f'<span class="mean">{times(factor)}</span>' if factor else None

    return Column(f"×\u00a0{baseline.spec}", cell)


def _work_columns(results: Results, unequal: bool) -> list[Column]:
    """Updates and samples: among the main figures where they differ between strategies."""
    columns = {"steps": "Updates", "samples": "Samples"}
    return [
        _column(heading, key, lambda count: f"{count:,.0f}", 0)
        for key, heading in columns.items()
        if is_unequal(results, key) == unequal
    ]


def _column(
    heading: str, measure: Measure, form: Callable[[float], str], better: int,
    varies: Literal["not", "evenly", "in proportion"] = "not", *, deviation: bool = False,
) -> Column:  # fmt: skip
    def found(entry: Entry) -> Spread | None:
        return entry.spread(measure)

    def cell(entry: Entry) -> str | None:
        values = found(entry)
        return _cell(values, form, len(entry.finished), deviation) if values else None

    return Column(heading, cell, found, better, varies)


def _cell(values: Spread, form: Callable[[float], str], runs: int, deviation: bool) -> str:
    known = deviation and values.deviation is not None
    around = f'<span class="sub">± {form(values.deviation or 0)}</span>' if known else ""
    some = f'<span class="sub">{len(values.values)} of {runs} seeds</span>' if len(values.values) < runs else ""
    return f'<span class="mean">{form(values.mean)}</span>{around}{some}'


def _to_target(entry: Entry, target: float | None) -> str | None:
    if target is None or not entry.finished:
        return None
    reached = entry.seconds_to(target)
    return _cell(reached, _seconds, len(entry.finished), True) if reached else '<span class="sub">not reached</span>'


def _all_reached(entry: Entry, target: float | None) -> Spread | None:
    """Only a strategy that got there with every seed is comparable with others."""
    reached = entry.seconds_to(target) if target is not None else None
    return reached if reached and len(reached.values) == len(entry.finished) else None


def _kernel(entry: Entry) -> str | None:
    """Bytes between nodes as the kernel counted them, and by how much that differs from the ledger."""
    runs = [summary for record in entry.finished if (summary := record.summary) and summary["kernel_bytes_by_link"]]
    kernel = spread([float(run["kernel_bytes_by_link"].get("between", 0)) for run in runs])
    ledger = spread([float((run["wire_bytes_by_link"] or {}).get("between", 0)) for run in runs])
    if kernel is None or ledger is None:
        return None
    apart = f'<span class="sub">{100 * (kernel.mean / ledger.mean - 1):+.1f} %</span>' if ledger.mean else ""
    return f"{format_bytes(kernel.mean)}{apart.replace('-', '−')}"


def _artifact_columns(results: Results) -> list[Column]:
    """A column for each kind of further model that strategies made and want to be shown."""
    headings = dict.fromkeys(
        one["column"] for entry in results.entries for one in artifacts_of(entry) if one["column"]
    )  # fmt: skip
    return [Column(heading, lambda entry, heading=heading: _artifact(entry, heading)) for heading in headings]  # type: ignore[misc]


def artifacts_of(entry: Entry) -> list[dict[str, Any]]:
    """The further models that a strategy's finished runs made."""
    return [one for r in entry.finished if (summary := r.summary) for one in summary.get("artifacts", [])]


def _artifact(entry: Entry, heading: str) -> str | None:
    """The size of a further model, and how often its parameters go into those of the whole one: means over seeds."""
    found = [one for one in artifacts_of(entry) if one["column"] == heading]
    if not found:
        return None
    num_bytes, ratio = (sum(one[key] for one in found) / len(found) for key in ("bytes", "ratio"))
    return f'{format_bytes(num_bytes)}<span class="sub">{ratio:.1f} : 1</span>'


def _series_columns(results: Results) -> list[Column]:
    """A column for each value of a strategy's status that shall be one."""
    return [
        Column(series.title, lambda entry, name=name: _series_cell(entry, name))  # type: ignore[misc]
        for name, series in declared_series(results).items()
        if series.draw == "column"
    ]


def _series_cell(entry: Entry, name: str) -> str | None:
    """The last number of the first seed that has one, and its ratio to the reference."""
    series = series_of(entry).get(name)
    found = [pair for r in entry.finished if (summary := r.summary) and (pair := summary.get("status", {}).get(name))]
    if series is None or not found or not found[0][0]:
        return None
    number, reference = found[0]
    return f'{format_count(number)}<span class="sub">{number / reference:.2f} × {escape(series.cell)}</span>'


def _best(column: Column, entries: list[Entry]) -> set[int]:
    """Which entries cannot be told apart from the best of a column, of those with a value for every seed."""
    found = {i: spread.values for i, entry in enumerate(entries) if (spread := column.values(entry))}
    whole = {i: values for i, values in found.items() if len(values) == len(entries[i].records)}
    if column.better == 0 or len(entries) < 2:
        return set()
    noise = NONE if column.varies == "not" else noise_of(list(found.values()), column.varies == "in proportion")
    return best_of(whole, column.better, noise) if noise else set()


def _row(i: int, entry: Entry, columns: list[Column], best: list[bool]) -> str:
    done, asked = len(entry.finished), len(entry.records)
    some = f'<span class="sub">{done} of {asked} runs finished</span>' if done < asked else ""
    cells = [(column.heading, column.cell(entry) or "–", ' class="best"' * mark)
             for column, mark in zip(columns, best, strict=True)]  # fmt: skip
    row = "".join(f'<td data-label="{escape(heading)}"{mark}>{cell}</td>' for heading, cell, mark in cells)
    return f'<tr><th scope="row"><div class="name">{spec_of(i, entry)}{some}</div></th>{row}</tr>\n'


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"
