"""What must be told beside the figures: a link that is not what was asked for, runs that failed or diverged."""

from __future__ import annotations

from html import escape
from typing import Any

from thinwire.compare.report.marks import is_number
from thinwire.compare.report.words import code, spec_of
from thinwire.compare.results import Entry, Record, Results


def notes(results: Results) -> str:
    """What a reader must know before believing the figures."""
    notes = [*_link_notes(all_summaries(results)), *_diverged_notes(results)]
    for heading, lines in (("Runs that failed", _failed(results)), ("Runs not finished", _unfinished(results))):
        if lines:
            notes.append(f"<strong>{heading}</strong><ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>")
    return "".join(f'<div class="note" role="note">{note}</div>' for note in notes)


def _link_notes(summaries: list[dict[str, Any]]) -> list[str]:
    notes = []
    for state, what, so in (
        ("not shaped", "The link was not shaped", "It could not be made on this machine, so the times are "
         "those of the bare machine, not of {}. Bytes and metrics do not depend on it."),
        ("off", "The link was more than 10 % off", "Asked for: {}. Mind that when comparing times."),
    ):  # fmt: skip
        runs = [summary for summary in summaries if summary["link_state"] == state]
        some = f" in {len(runs)} of {len(summaries)} runs" if len(runs) < len(summaries) else ""
        measured = f" Measured: {text}." if (text := measured_link(runs)) else ""
        if runs:
            notes.append(f"<strong>{what}{some}.</strong> {so.format(code(runs[0]['link']))}{measured}")
    return notes


def measured_link(summaries: list[dict[str, Any]]) -> str:
    """The measured link of some runs, from the lowest to the highest figure."""
    measured = [summary["link_measured"] for summary in summaries if summary.get("link_measured")]
    words = []
    for key, form, unit in (("rate_mbit", "{:.1f}", "Mbit/s"), ("latency_ms", "{:.2f}", "ms")):
        values = [form.format(v) for v in sorted(m[key] for m in measured if m.get(key) is not None)]
        words += [f"{'–'.join(dict.fromkeys((values[0], values[-1])))} {unit}"] if values else []
    return " and ".join(words)


def _diverged_notes(results: Results) -> list[str]:
    lost = [
        f"{spec_of(i, entry)}, seed {record.seed}"
        for i, entry, record in all_records(results)
        if record.summary and not is_number(record.summary["value"])
    ]
    what = "Runs that ended with a metric that is not a number"
    return [f"<strong>{what}</strong>, left out of the means: {'; '.join(lost)}."] if lost else []


def _failed(results: Results) -> list[str]:
    failed = [(i, entry, record) for i, entry, record in all_records(results) if record.error]
    return [f"{spec_of(i, e)}, seed {r.seed}: <span class=error>{escape(r.error or '')}</span>" for i, e, r in failed]


def _unfinished(results: Results) -> list[str]:
    left = [(i, e, r) for i, e, r in all_records(results) if r.summary is None and not r.error]
    return [f"{spec_of(i, entry)}, seed {record.seed}" for i, entry, record in left]


def all_records(results: Results) -> list[tuple[int, Entry, Record]]:
    """Every run, with its strategy and that one's number."""
    return [(i, entry, record) for i, entry in enumerate(results.entries) for record in entry.records]


def all_summaries(results: Results) -> list[dict[str, Any]]:
    """Of all runs that finished."""
    return [record.summary for _, _, record in all_records(results) if record.summary]
