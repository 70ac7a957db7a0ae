"""The table of a report: a row for each strategy, the best of each column marked."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import NamedTuple

from thinwire.report.marks import better
from thinwire.report.words import spec_of
from thinwire.results import Entry, Figure, Results, Spread, on_link, spread
from thinwire.tables import count_of, show, size


class Column(NamedTuple):
    """A column of the results: what a cell says, the values behind it, and which way is better (0: neither)."""

    heading: str
    cell: Callable[[Entry], str | None]
    values: Callable[[Entry], Spread | None]
    better: int


def results_table(results: Results) -> str:
    """The table and how to read it."""
    columns = [c for c in _columns(results) if any(c.cell(entry) for entry in results.entries)]
    heads = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    best = [_best(column, results.entries) for column in columns]
    rows = "".join(_row(i, e, columns, [i in b for b in best]) for i, e in enumerate(results.entries))
    seeds = max(len(entry.records) for entry in results.entries)
    words = f"Means over seeds, ± deviation over {seeds} seeds." if seeds > 1 else "One seed, so no deviation is known."
    words += " The best of each column, and what is within a deviation of it, is underlined." if any(best) else ""
    return f"""<h2 id="results">Results</h2><p>{words}</p>
<div class="wide" role="region" aria-labelledby="results" tabindex="0"><table>
<thead><tr><th scope="col">Strategy</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"""


def _columns(results: Results) -> list[Column]:
    metric = (results.example or {}).get("metric", "loss")
    unit, sign, target = (" (%)" if metric == "accuracy" else ""), better(metric), results.target

    def value(number: float) -> str:
        return show(number, metric).removesuffix(" %")

    reached = f"Time to {show(target, metric)} (s)" if target is not None else ""
    return [
        _column(f"Final {metric}{unit}", "value", value, sign, deviation=True),
        _column(f"Best {metric}{unit}", "best", value, sign, deviation=True),
        _column("Training time (s)", "train_seconds", _seconds, -1, deviation=True),
        Column(reached, lambda e: _to_target(e, target), lambda e: _all_reached(e, target), -1),
        _column("Sent per rank", "wire_bytes_per_rank", size, -1),
        _column("Sent between nodes", on_link("wire", "between"), size, -1),
        Column("Between nodes, by kernel", _kernel, lambda e: None, 0),
        _column("Waiting (%)", "waiting_share", lambda share: f"{100 * share:.1f}", -1),
        _column("Samples per s", "samples_per_second", lambda speed: f"{speed:,.0f}", 1),
        _column("Peak memory", "peak_memory_bytes", size, -1),
        Column("Factored model", _factored, lambda e: None, 0),
        Column("Operations a sample", _operations, lambda e: None, 0),
    ]


def _column(
    heading: str, figure: Figure, form: Callable[[float], str], better: int, *, deviation: bool = False
) -> Column:
    def found(entry: Entry) -> Spread | None:
        return entry.spread(figure)

    def cell(entry: Entry) -> str | None:
        values = found(entry)
        return _cell(values, form, len(entry.finished), deviation) if values else None

    return Column(heading, cell, found, better)


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
    return f"{size(kernel.mean)}{apart.replace('-', '−')}"


def _factored(entry: Entry) -> str | None:
    """The size of the model with low-rank layers as two thin ones, and how often it fits into the full one."""
    small = [summary["factored"] for r in entry.finished if (summary := r.summary) and summary.get("factored")]
    if not small:
        return None
    num_bytes, ratio = (sum(one[key] for one in small) / len(small) for key in ("bytes", "ratio"))
    return f'{size(num_bytes)}<span class="sub">{ratio:.1f} : 1</span>'


def _operations(entry: Entry) -> str | None:
    """What training on a sample costs, and how much that is of backpropagation's; of strategies that cut models."""
    found = [summary for r in entry.finished if (summary := r.summary) and summary.get("flops_per_sample")]
    if not found:
        return None
    flops, backprop = (found[0][key] for key in ("flops_per_sample", "backprop_flops_per_sample"))
    return f'{count_of(flops)}<span class="sub">{flops / backprop:.2f} × backprop</span>'


def _best(column: Column, entries: list[Entry]) -> set[int]:
    """Which entries are best in a column, or no further from it than their deviation; none where all are."""
    whole = {i: entry for i, entry in enumerate(entries) if len(entry.finished) == len(entry.records)}  # the same seeds
    found = {i: values for i, entry in whole.items() if (values := column.values(entry)) is not None}
    if column.better == 0 or not found:
        return set()
    best = max(found.values(), key=lambda values: column.better * values.mean)
    alike = {i for i, v in found.items() if abs(v.mean - best.mean) <= max(v.deviation or 0, best.deviation or 0)}
    return alike if len(alike) < len(found) else set()


def _row(i: int, entry: Entry, columns: list[Column], best: list[bool]) -> str:
    done, asked = len(entry.finished), len(entry.records)
    some = f'<span class="sub">{done} of {asked} runs finished</span>' if done < asked else ""
    cells = [(column.cell(entry) or "–", mark) for column, mark in zip(columns, best, strict=True)]
    row = "".join(f'<td class="best">{cell}</td>' if mark else f"<td>{cell}</td>" for cell, mark in cells)
    return f'<tr><th scope="row"><div class="name">{spec_of(i, entry)}{some}</div></th>{row}</tr>\n'


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"
