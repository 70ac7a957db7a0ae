"""What benchmarks of whole trainings share: run `thinwire compare`, and read what its runs left behind."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from thinwire.compare.results import Entry, read_results

ALONE = "local_sgd(every=1000000000)"  # ranks that meet at the end of each epoch only: computing, and nothing else


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
    """Seconds of computing in a step when all ranks compute at once and nobody sends, and the model's parameters.

    Those of the fastest epoch: the machine may have been busy with something else in the others.
    """
    entry = compare([ALONE], **settings, seeds=1)[ALONE]
    rows = [{"step": 0, "train_seconds": 0.0, "waiting_seconds": 0.0}, *entry.finished[0].metrics]
    return min(computing(*epoch) for epoch in itertools.pairwise(rows)), int(mean(entry, "parameters"))


def computing(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Seconds of computing in a step, between two rows of a run's metrics."""
    steps, seconds, waiting = (after[name] - before[name] for name in ("step", "train_seconds", "waiting_seconds"))
    return float(seconds - waiting) / steps


def mean(entry: Entry, figure: str) -> float:
    """The mean over seeds of a figure of the runs' summaries."""
    spread = entry.spread(figure)
    assert spread is not None
    return spread.mean


def between_bytes(entry: Entry) -> float:
    """Bytes that left a node, by the ledger: the mean over seeds."""
    spread = entry.spread(lambda summary: summary["wire_bytes_by_link"]["between"])
    assert spread is not None
    return spread.mean


def measured_link(entries: dict[str, Entry]) -> str:
    """What the runs found their link to be."""
    found = [r.summary["link_measured"]["rate_mbit"] for e in entries.values() for r in e.finished if r.summary]
    return f"measured {min(found):.0f} – {max(found):.0f} Mbit/s"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for first, *others in [head, *rows]:
        print("  ".join([first.ljust(widths[0]), *(o.rjust(w) for o, w in zip(others, widths[1:], strict=True))]))
