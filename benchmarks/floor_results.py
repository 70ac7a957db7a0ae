"""The results of benchmarks/floor.py: the file that they are kept in, and what follows from them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import NamedTuple

from conditions import Found, write_json

LINKS = {"100mbit": 100.0, "1gbit": 1e3, "10gbit": 1e4, "none": None}  # Mbit/s; none is the loopback interface
BY_HAND = "written by hand"  # the loop that the trainer alone is compared with
MOST_ROUNDS, FEWEST_ROUNDS = 5, 2


class Line(NamedTuple):
    """What a table says of one row on one link; times in ms."""

    name: str
    megabytes: float  # that the busiest rank sends in a step
    floor: float  # bytes of the busiest host ÷ nominal rate of the link
    compute: float
    bound: float  # what no exchange of this kind can beat
    ms: float  # measured, of a step
    ratio: float  # measured ÷ bound
    blocks: bool
    cpu: float  # CPU time of all ranks ÷ cores
    gigabytes: float | None  # memory of a step on the GPU


def plan(budget: float, period_seconds: float) -> tuple[int, int]:
    """How many rounds, and how many periods in each, take about `budget` seconds."""
    rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(budget / period_seconds)))
    return rounds, max(1, int(budget / rounds / period_seconds))


def floor_ms(num_bytes: float, rate_mbit: float | None) -> float:
    """The time that bytes need on a link at its nominal rate; 0 without a link."""
    return 0.0 if rate_mbit is None else 8e-3 * num_bytes / rate_mbit


def bound_ms(compute: float, floor: float, blocks: bool) -> float:
    """max(compute, floor) if computing and sending overlap, else compute + floor."""
    return compute + floor if blocks else max(compute, floor)


def line(found: Found) -> Line:
    """The line of a row that was measured."""
    compute, ms = statistics.median(found["compute_ms"]), statistics.median(found["rounds_ms"])
    floor = floor_ms(found["host_bytes"], LINKS[found["link"]])
    bound = bound_ms(compute, floor, found["blocks"])
    memory = found["memory_bytes"]
    return Line(
        found["row"], found["rank_bytes"] / 1e6, floor, compute, bound, ms, ms / bound, found["blocks"],
        found["cpu_ms"], None if memory is None else memory / 1e9,
    )  # fmt: skip


class Results:
    """A results file. Each addition writes it anew, to a new file that replaces the old one.

    Each row, and each case of the trainer, says itself when and with which revision it was measured. What stands at the
    head is of the first command; later ones add their own to `commands`.
    """

    def __init__(self, path: Path, about: Found, resume: bool) -> None:
        self.path = path
        self.data: Found = {**about, "links": {}, "trainer": [], "rows": []}
        if path.exists() and not resume:
            raise SystemExit(f"{path} has results already; --resume adds to them, another --out begins anew")
        if path.exists():
            saved = json.loads(path.read_text())
            same = ("device", "hardware", "versions", "model", "batch_size", "ranks", "parameters", "kernels")
            differing = [
                f"{key} {saved.get(key)}, not {about.get(key)}" for key in same if saved.get(key) != about.get(key)
            ]
            if differing:
                raise SystemExit(f"{path} has {'; '.join(differing)}; give another --out")
            self.data = {**saved, "commands": [*saved["commands"], *about["commands"]]}

    def add_row(self, found: Found) -> None:
        """Add what was found of a row on a link, in place of what was found before."""
        self.data["rows"] = [r for r in self.data["rows"] if (r["link"], r["row"]) != (found["link"], found["row"])]
        self.data["rows"].append(found)
        self.save()

    def add_trainer(self, found: Found) -> None:
        """Add the times of the trainer alone with one model."""
        self.data["trainer"] = [t for t in self.data["trainer"] if t["name"] != found["name"]] + [found]
        self.save()

    def add_rate(self, link: str, hosts: int, rate_mbit: float) -> None:
        """Add what a link between so many hosts was measured at."""
        self.data["links"].setdefault(link, {})[str(hosts)] = round(rate_mbit, 1)

    def has_row(self, link: str, name: str, revision: str | None = None) -> bool:
        """Whether a row was measured on a link, of this revision if one is given; one that failed was not."""
        return any((r["link"], r["row"]) == (link, name) and _counts(r, revision) for r in self.data["rows"])

    def has_trainer(self, name: str, revision: str | None = None) -> bool:
        """Whether the trainer alone was measured with a model, of this revision if one is given."""
        return any(t["name"] == name and _counts(t, revision) for t in self.data["trainer"])

    def save(self) -> None:
        """Write the file."""
        write_json(self.path, self.data)


def _counts(found: Found, revision: str | None) -> bool:
    return "failed" not in found and revision in (None, found["revision"])
