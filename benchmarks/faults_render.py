"""The results of benchmarks/faults.py as text: a line for a terminal, and the tables of docs/reliability.md."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from conditions import Found, where

KINDS = {  # of problems, by how they begin
    "hangs": ("hang",),
    "wrong sums": ("wrong",),
    "unclear ends": ("unclear", "not resumed"),
    "left behind": ("left behind",),
}
PHASES = {
    "start": "while ranks started",
    "training": "in training",
    "saving": "at a checkpoint",
    "leaving": "while ranks left",
}
BEGIN, END = "<!-- measured: drawn by python benchmarks/faults.py --render -->\n", "<!-- end -->"


def faults_of(data: Found) -> list[tuple[str, str, Found]]:
    """Strategy, fault and result of every fault that happened; those that came too late are none."""
    parts = [(key.split(" | "), found) for key, found in data["cells"].items()]
    return [(key[0], key[1], found) for key, found in parts if found["result"] != "came too late"]


def count(found: Sequence[Found], problem: str) -> int:
    """How many of some results have a problem of a kind."""
    return sum(any(text.startswith(KINDS[problem]) for text in one["problems"]) for one in found)


def is_equal(found: Found) -> bool:
    """Whether a run gave the undisturbed run's files bit for bit."""
    return not any(text.startswith(("hang", "wrong", "not resumed")) for text in found["problems"])


def summary(data: Found) -> str:
    """All faults in a sentence."""
    found = [one for _, _, one in faults_of(data)]
    went_on = sum(one["result"] == "went on" for one in found)
    problems = ", ".join(f"{count(found, name)} {name}" for name in KINDS)
    return (
        f"{len(found)} faults: {went_on} runs went on, {len(found) - went_on} ended and were resumed; "
        f"{sum(map(is_equal, found))} ended with the files of the undisturbed run, bit for bit; {problems}"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def by_fault(data: Found) -> str:
    """What became of the runs with each fault."""
    rows = []
    for name in dict.fromkeys(fault for _, fault, _ in sorted(faults_of(data), key=lambda one: one[1])):
        found = [one for _, fault, one in faults_of(data) if fault == name]
        went_on = sum(one["result"] == "went on" for one in found)
        lost = [one["lost_seconds"] for one in found]
        rows.append([
            name, len(found), went_on, len(found) - went_on, sum(map(is_equal, found)),
            *(count(found, problem) for problem in KINDS), f"{statistics.median(lost):.1f} ({max(lost):.1f})",
        ])  # fmt: skip
    heads = ["fault", "runs", "went on", "ended, resumed", "equal bit for bit", *KINDS, "seconds lost (most)"]
    return table(heads, rows)


def by_strategy(data: Found) -> str:
    """How many faults each strategy had, and how many of them left its run equal."""
    strategies, faults = (sorted({one[i] for one in faults_of(data)}) for i in (0, 1))
    rows = []
    for strategy in strategies:
        row: list[object] = [f"`{strategy}`"]
        for fault in faults:
            found = [one for s, f, one in faults_of(data) if (s, f) == (strategy, fault)]
            bad = sum(bool(one["problems"]) for one in found)
            row.append(f"{len(found)} ({bad} with problems)" if bad else len(found) or "–")
        rows.append(row)
    return table(["strategy", *faults], rows)


def ends(data: Found) -> str:
    """How long the ranks were there after one of them was killed, where that ended the run."""
    killed = [one for _, _, one in faults_of(data) if "process" in one["did"] or one["did"].startswith("cut")]
    seconds = [one["ended_after_seconds"] for one in killed if one["result"] != "went on"]
    if not seconds:
        return ""
    median, most = statistics.median(seconds), max(seconds)
    return f"Where a killed rank ended the run, all had ended after {median:.1f} s (median; at most {most:.1f} s). "


def by_phase(data: Found) -> str:
    """When faults happened."""
    found = [one for _, _, one in faults_of(data)]
    return ", ".join(f"{sum(one['moment']['phase'] == p for one in found)} {text}" for p, text in PHASES.items())


def problems(data: Found) -> str:
    """Every problem, or that there is none."""
    lines = [f"- `{s}`, {f}: {text}\n" for s, f, one in faults_of(data) for text in one["problems"]]
    return "".join(lines) or "No run had a problem.\n"


def measured(data: Found) -> str:
    """The part of the page that shows what was measured."""
    dates = sorted({one["date"] for _, _, one in faults_of(data)})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    about = f"{when}, {where(data['hardware'])}, Python {data['versions']['python']}, torch {data['versions']['torch']}"
    return (
        f"{summary(data)}.\n\n{by_fault(data)}\nThe number of faults of each strategy:\n\n{by_strategy(data)}\n"
        f"When they happened: {by_phase(data)}. {ends(data)}Measured {about}, with other work on the same machine. "
        f"Revisions: {', '.join(sorted({one['revision'] for _, _, one in faults_of(data)}))}.\n\n{problems(data)}"
    )


def draw(docs: Path) -> None:
    """Write what reliability.json says into reliability.md."""
    page, data = docs / "reliability.md", json.loads((docs / "reliability.json").read_text())
    text = page.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    drawn = re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{measured(data)}\n{END}", text, flags=re.S
    )
    page.write_text(drawn)
