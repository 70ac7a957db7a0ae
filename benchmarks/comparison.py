"""Shared by benchmarks of whole trainings: run `thinwire compare`, and read what its runs wrote."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from thinwire.compare.results import Entry, Measure, on_link, read_results

NO_EXCHANGE = "local_sgd(every=1000000000)"  # ranks communicate at the end of each epoch only


def compare(specs: list[str], **settings: Any) -> dict[str, Entry]:
    """Each strategy's runs, by its spec. Progress goes to stderr; the folder of the comparison is removed."""
    names = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    options = [word for name, value in names.items() for word in ([name] if value is True else [name, str(value)])]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "comparison")
        command = [sys.executable, "-m", "thinwire", "compare", *specs, *options, "--baseline", "none"]
        command += ["--out", str(folder)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        entries = {entry.spec: entry for entry in read_results(folder).entries}
    if errors := [error for entry in entries.values() for error in entry.errors]:
        sys.exit("\n".join(errors))
    return entries


def compute_seconds(**settings: Any) -> tuple[float, int]:
    """Seconds of computing in a step if all ranks compute at once and send nothing, and the number of parameters.

    The seconds are those of the fastest epoch: in the others the machine may have been busy with something else.
    """
    entry = compare([NO_EXCHANGE], **settings, seeds=1)[NO_EXCHANGE]
    rows = [{"step": 0, "train_seconds": 0.0, "waiting_seconds": 0.0}, *entry.finished[0].metrics]
    return min(step_compute_seconds(*epoch) for epoch in itertools.pairwise(rows)), int(mean(entry, "parameters"))


def step_compute_seconds(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Seconds of computing in a step, between two rows of a run's metrics."""
    steps, seconds, waiting = (after[name] - before[name] for name in ("step", "train_seconds", "waiting_seconds"))
    return float(seconds - waiting) / steps


def mean(entry: Entry, measure: Measure) -> float:
    """The mean of a measure over seeds."""
    spread = entry.spread(measure)
    assert spread is not None
    return spread.mean


def between_bytes(entry: Entry) -> float:
    """The bytes that left a node, by the ledger: mean over seeds."""
    return mean(entry, on_link("wire", "between"))


def measured_link(entries: dict[str, Entry]) -> str:
    """The rates of the link that the runs measured."""
    found = [r.summary["link_measured"]["rate_mbit"] for e in entries.values() for r in e.finished if r.summary]
    return f"measured {min(found):.0f} – {max(found):.0f} Mbit/s"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table: the first column aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for first, *others in [head, *rows]:
        print("  ".join([first.ljust(widths[0]), *(o.rjust(w) for o, w in zip(others, widths[1:], strict=True))]))
