"""The results of a comparison, read from its folder: Results has an Entry per strategy, an Entry a Record per seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.compare.files import holds_comparison, read_comparison_file, read_summary, run_place
from thinwire.errors import UsageError
from thinwire.run.records import RunFolder, read_rows

# A number taken from the summary of a run: a key of the summary, or a function that computes the number from it.
Measure = str | Callable[[dict[str, Any]], float | None]


class Spread(NamedTuple):
    """The values of a measure over seeds, their mean, and their sample standard deviation (None for one value)."""

    mean: float
    deviation: float | None
    values: list[float]


def spread(values: list[float]) -> Spread | None:
    """Mean and sample standard deviation of some values; None if there are none.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951, values=[1.0, 3.0])
    """
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, values)


def metric_sign(summary: dict[str, Any]) -> int:
    """+1 if a higher metric is better, −1 if a lower one is. In older summaries only accuracy was."""
    higher = summary.get("higher_is_better")
    return 1 if (summary["metric"] == "accuracy" if higher is None else higher) else -1


@dataclass(frozen=True)
class Record:
    """What one run wrote: its summary, rows of metrics after epochs and within, and the timeline of a few steps.

    A run that has not finished has no summary; if it failed, `error` says why.
    """

    seed: int
    folder: Path
    summary: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    timeline: list[dict[str, Any]]
    error: str | None = None

    def seconds_to(self, target: float) -> float | None:
        """Training seconds until the metric first reached the target; None if it never did."""
        has_accuracy = any("test_accuracy" in row for row in self.metrics)
        summary = self.summary or {"metric": "accuracy" if has_accuracy else "loss"}  # of a run that has not finished
        name, sign = f"test_{summary['metric']}", metric_sign(summary)
        rows = [row for row in self.metrics if name in row]
        return next((row["train_seconds"] for row in rows if sign * row[name] >= sign * target), None)


@dataclass(frozen=True)
class Entry:
    """One strategy of a comparison, with a Record for each seed.

    Among the results of several folders, `part` is the number of its folder, and `label` the folder's name if the
    spec alone does not tell which result is meant.
    """

    spec: str
    records: list[Record]
    part: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return f"{self.spec} · {self.label}" if self.label else self.spec

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.summary is not None]

    @property
    def errors(self) -> list[str]:
        return [f"seed {record.seed}: {record.error}" for record in self.records if record.error]

    @property
    def choices(self) -> list[tuple[int, str]]:
        """Of a strategy that chooses another, as auto: each seed, what it took and why."""
        found = [(record.seed, (record.summary or {}).get("status") or {}) for record in self.finished]
        return [(seed, f"took {status['choice']}: {status['reason']}") for seed, status in found
                if status.get("choice") and status.get("reason")]  # fmt: skip

    def spread(self, measure: Measure) -> Spread | None:
        """A measure over the seeds that finished.

        Seeds without it, and seeds where it is not finite because training diverged, are left out. None if no seed
        has a value.
        """
        pick = measure if callable(measure) else (lambda summary: summary.get(measure))
        values = [pick(record.summary) for record in self.finished if record.summary is not None]
        return spread([float(value) for value in values if value is not None and math.isfinite(value)])

    def seconds_to(self, target: float) -> Spread | None:
        """Training seconds to a target, over the seeds that reached it."""
        return spread([s for record in self.finished if (s := record.seconds_to(target)) is not None])


@dataclass(frozen=True)
class Results:
    """A comparison, or a single run as a comparison of one strategy, or several of either.

    Of several, `parts` are the results of each folder by the folder's name, and `notes` say how they differ.
    `is_comparable` says that all were trained with the same settings.
    """

    folder: Path
    entries: list[Entry]
    command: str  # the command line that repeats it
    target: float | None = None
    parts: dict[str, Results] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_comparable: bool = True

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """Of all runs that finished."""
        return [record.summary for entry in self.entries for record in entry.finished if record.summary]

    @property
    def example(self) -> dict[str, Any] | None:
        """The summary of any finished run. In one folder, task, ranks, link and versions are the same for all."""
        return next(iter(self.summaries), None)

    @property
    def metric(self) -> str:
        """The metric that the strategies are compared by: accuracy or loss."""
        return str(self.example["metric"]) if self.example else "accuracy"

    @property
    def sign(self) -> int:
        """+1 if a higher metric is better, −1 if a lower one is."""
        return metric_sign(self.example) if self.example else 1

    @property
    def shares_link(self) -> bool:
        """Do the ranks of a node share its link? Then the bytes between nodes are the cost of a strategy."""
        return bool(self.summaries) and all(summary["nodes"] > 1 for summary in self.summaries)

    @property
    def cost(self) -> Callable[[dict[str, Any]], float]:
        """The measure of bytes sent in training: between nodes by all ranks; on one node, by a rank on average."""
        return sent(TRAINING, "between") if self.shares_link else sent(TRAINING)


def on_link(counter: str, link: str) -> Callable[[dict[str, Any]], float | None]:
    """The measure of bytes "inside" or "between" nodes, as counted by the ledger ("wire") or by the Linux "kernel"."""
    return lambda summary: (summary[f"{counter}_bytes_by_link"] or {}).get(link)


def sent(purposes: Collection[str] | None = None, link: str | None = None) -> Callable[[dict[str, Any]], float]:
    """The measure of wire bytes for some purposes (default: all): by all ranks on a link, or by a rank on average."""

    def pick(summary: dict[str, Any]) -> float:
        by_purpose = summary["wire_bytes_by_purpose"]
        if link is not None:
            return bytes_of(by_purpose, purposes, (link,))
        return round(bytes_of(by_purpose, purposes) / int(summary["ranks"]))

    return pick


def read_results(folder: Path) -> Results:
    """Read the results in a folder that `thinwire compare` or `thinwire train` wrote."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give one that thinwire compare or thinwire train wrote")
    if holds_comparison(folder):
        return _read_comparison(folder)
    run = RunFolder(folder)
    if not run.config.exists():
        raise UsageError(
            f"{folder} holds no comparison and no run (no compare.json, no config.toml); "
            "give a folder that thinwire compare or thinwire train wrote"
        )
    config = run.load_config()
    record = _read_record(run, config.seed)
    if record.summary is None:
        raise UsageError(f"the run in {folder} is not finished; go on with it: thinwire train --out {folder} --resume")
    return Results(folder, [Entry(config.strategy, [record])], f"thinwire train {run.config} --out OTHER")


def _read_comparison(folder: Path) -> Results:
    about = read_comparison_file(folder)
    entries = []
    for i, spec in enumerate(about["specs"]):
        places = {seed: run_place(i, spec, seed) for seed in about["seeds"]}
        errors = about["errors"]
        records = [_read_record(RunFolder(folder / place), seed, errors.get(place)) for seed, place in places.items()]
        entries.append(Entry(spec, records))
    return Results(folder, entries, about["command"], about["target"])


def _read_record(run: RunFolder, seed: int, error: str | None = None) -> Record:
    summary = read_summary(run.summary) if run.summary.exists() else None
    metrics, timeline = (read_rows(file) for file in (run.metrics, run.timeline))
    return Record(seed, run.path, summary, metrics, timeline, None if summary else error)
