"""What runs left behind, read back: one run, or a comparison of many, and the figures that compare them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.errors import UsageError
from thinwire.run.records import RunFolder, read_rows
from thinwire.run.schema import NEEDED

FORMAT = 1  # of compare.json and results.json
Figure = str | Callable[[dict[str, Any]], float | None]  # of a summary: its key, or what to make of it


class Spread(NamedTuple):
    """Values over seeds, with their mean and sample standard deviation (None for fewer than two)."""

    mean: float
    deviation: float | None
    values: list[float]


@dataclass(frozen=True)
class Record:
    """One run. Without a summary it is not finished; `error` says why, if it failed."""

    seed: int
    folder: Path
    summary: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    timeline: list[dict[str, Any]]
    error: str | None = None

    def seconds_to(self, target: float) -> float | None:
        """Training seconds until the metric was first as good as the target, if it ever was."""
        name, sign = ("test_accuracy", 1) if any("test_accuracy" in row for row in self.metrics) else ("test_loss", -1)
        rows = [row for row in self.metrics if name in row]
        return next((row["train_seconds"] for row in rows if sign * row[name] >= sign * target), None)


@dataclass(frozen=True)
class Entry:
    """One strategy with the runs of all its seeds."""

    spec: str
    records: list[Record]

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.summary is not None]

    @property
    def errors(self) -> list[str]:
        return [f"seed {record.seed}: {record.error}" for record in self.records if record.error]

    def spread(self, figure: Figure) -> Spread | None:
        """A figure of the summaries over seeds, without those that have none or diverged; None where none has it."""
        pick = figure if callable(figure) else (lambda summary: summary.get(figure))
        values = [pick(record.summary) for record in self.finished if record.summary is not None]
        return spread([float(value) for value in values if value is not None and math.isfinite(value)])

    def seconds_to(self, target: float) -> Spread | None:
        """Training seconds to a target, over the seeds that reached it."""
        return spread([s for record in self.finished if (s := record.seconds_to(target)) is not None])


@dataclass(frozen=True)
class Results:
    """A comparison, or a single run as a comparison of one."""

    folder: Path
    entries: list[Entry]
    command: str  # that repeats it
    target: float | None = None

    @property
    def example(self) -> dict[str, Any] | None:
        """The summary of some finished run: task, ranks, link and versions are the same for all."""
        return next((r.summary for entry in self.entries for r in entry.finished), None)

    @property
    def metric(self) -> str:
        """What the strategies are compared by."""
        return str(self.example["metric"]) if self.example else "accuracy"

    @property
    def sign(self) -> int:
        """+1 where more of the metric is better, −1 where less is."""
        return better(self.metric)

    @property
    def shares_link(self) -> bool:
        """Do ranks of a node share its link? Then bytes between nodes are what a strategy costs."""
        return any(r.summary["nodes"] > 1 for entry in self.entries for r in entry.finished if r.summary)

    @property
    def cost(self) -> Callable[[dict[str, Any]], float]:
        """The bytes that training took, of a summary: between nodes by all ranks, or on one node by a rank."""
        return sent(TRAINING, "between") if self.shares_link else sent(TRAINING)


def better(metric: str) -> int:
    """+1 where more of a metric is better, −1 where less is."""
    return 1 if metric == "accuracy" else -1


def spread(values: list[float]) -> Spread | None:
    """Mean and sample standard deviation.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951, values=[1.0, 3.0])
    """
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, values)


def on_link(who: str, link: str) -> Callable[[dict[str, Any]], float | None]:
    """The bytes inside or between nodes, by the ledger ("wire") or the kernel, of a summary that has them."""
    return lambda summary: (summary[f"{who}_bytes_by_link"] or {}).get(link)


def sent(purposes: Collection[str] | None = None, link: str | None = None) -> Callable[[dict[str, Any]], float]:
    """The bytes of a summary for some purposes (default: all): of all ranks on a link, or without one of a rank."""

    def pick(summary: dict[str, Any]) -> float:
        by_purpose = summary["wire_bytes_by_purpose"]
        if link is not None:
            return bytes_of(by_purpose, purposes, (link,))
        return round(bytes_of(by_purpose, purposes) / int(summary["ranks"]))

    return pick


def read_results(folder: Path) -> Results:
    """The results in a folder that `thinwire compare` or `thinwire train` wrote."""
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
    record = read_record(run, config.seed)
    if record.summary is None:
        raise UsageError(f"the run in {folder} is not finished; go on with it: thinwire train --out {folder} --resume")
    return Results(folder, [Entry(config.strategy, [record])], f"thinwire train {run.config} --out OTHER")


def read_record(run: RunFolder, seed: int, error: str | None = None) -> Record:
    """One run as it stands."""
    summary = read_summary(run.summary) if run.summary.exists() else None
    metrics, timeline = (read_rows(file) for file in (run.metrics, run.timeline))
    return Record(seed, run.path, summary, metrics, timeline, None if summary else error)


def read_summary(path: Path) -> dict[str, Any]:
    """A summary.json with everything that is needed here, or an error that says what is wrong with it."""
    summary = _read_json(path)
    missing = [key for key in NEEDED if key not in summary]
    if missing:
        by = summary.get("versions", {}).get("thinwire", "another program")
        raise UsageError(
            f"{path} was written by thinwire {by} and lacks {', '.join(missing)}; "
            "move that run's folder away and do it again"
        )
    return summary


def _read_comparison(folder: Path) -> Results:
    about = read_comparison_file(folder)
    entries = [
        Entry(
            spec,
            [
                read_record(RunFolder(folder / place), seed, about["errors"].get(place))
                for seed in about["seeds"]
                for place in [run_place(i, spec, seed)]
            ],
        )
        for i, spec in enumerate(about["specs"])
    ]
    return Results(folder, entries, about["command"], about["target"])


def holds_comparison(folder: Path) -> bool:
    """Was this folder written by `thinwire compare`?"""
    return (folder / "compare.json").exists()


def read_comparison_file(folder: Path) -> dict[str, Any]:
    """compare.json: what is compared, and which runs failed."""
    path = folder / "compare.json"
    about = _read_json(path)
    if about.get("format") != FORMAT:
        raise UsageError(
            f"{path} has format {about.get('format')}, this version reads {FORMAT}; repeat the comparison, "
            "or use the version of thinwire that wrote it"
        )
    if missing := [key for key in ("specs", "seeds", "target", "errors", "command") if key not in about]:
        raise UsageError(f"{path} lacks {', '.join(missing)}: it is damaged; repeat the comparison")
    return about


def run_place(index: int, spec: str, seed: int) -> str:
    """The folder of one run, within that of its comparison.

    >>> run_place(1, "data_parallel(bucket_mb=5)", 0)
    'runs/2-data_parallel/seed-0'
    """
    return f"runs/{index + 1}-{spec.partition('(')[0]}/seed-{seed}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; it is damaged, or not thinwire's") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not one of thinwire's files; check the folder")
    return value
