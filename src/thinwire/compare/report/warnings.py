"""What a reader must know before trusting the numbers: a link that is not as asked, runs that failed or diverged."""

from __future__ import annotations

from typing import Any, NamedTuple

from thinwire.compare.report.style import is_number
from thinwire.compare.report.words import StrategyName, strategy_name
from thinwire.compare.results import Record, Results


class LinkWarning(NamedTuple):
    """Runs whose link was not as asked for."""

    state: str  # "not shaped" or "off"
    asked: str
    where: str  # " in 2 of 6 runs", or empty if in all
    measured: str


class RunWarning(NamedTuple):
    """A run that failed, diverged or has not finished."""

    name: StrategyName
    seed: int
    error: str


class Warnings(NamedTuple):
    """All warnings about a comparison."""

    links: list[LinkWarning]
    diverged: list[RunWarning]
    failed: list[RunWarning]
    unfinished: list[RunWarning]


def find_warnings(results: Results) -> Warnings:
    """The warnings about a comparison."""
    runs = [
        (record, RunWarning(strategy_name(i, entry), record.seed, record.error or ""))
        for i, entry in enumerate(results.entries)
        for record in entry.records
    ]
    return Warnings(
        links=_link_warnings(all_summaries(results)),
        diverged=[one for record, one in runs if record.summary and not is_number(record.summary["value"])],
        failed=[one for record, one in runs if record.error],
        unfinished=[one for record, one in runs if record.summary is None and not record.error],
    )


def _link_warnings(summaries: list[dict[str, Any]]) -> list[LinkWarning]:
    found = []
    for state in ("not shaped", "off"):
        runs = [summary for summary in summaries if summary["link_state"] == state]
        where = f" in {len(runs)} of {len(summaries)} runs" if len(runs) < len(summaries) else ""
        if runs:
            found.append(LinkWarning(state, runs[0]["link"], where, measured_link(runs)))
    return found


def measured_link(summaries: list[dict[str, Any]]) -> str:
    """The measured rate and latency of some runs, each from the lowest to the highest; empty if not measured."""
    measured = [summary["link_measured"] for summary in summaries if summary.get("link_measured")]
    words = []
    for key, form, unit in (("rate_mbit", "{:.1f}", "Mbit/s"), ("latency_ms", "{:.2f}", "ms")):
        values = [form.format(v) for v in sorted(m[key] for m in measured if m.get(key) is not None)]
        words += [f"{'–'.join(dict.fromkeys((values[0], values[-1])))} {unit}"] if values else []
    return " and ".join(words)


def all_records(results: Results) -> list[Record]:
    """Every run."""
    return [record for entry in results.entries for record in entry.records]


def all_summaries(results: Results) -> list[dict[str, Any]]:
    """The summaries of all runs that finished."""
    return results.summaries
