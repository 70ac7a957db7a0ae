"""The results of cells: what is kept of a run, the JSON file that they are in, and how long cells take."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from cifar10.cells import Cell, cells
from cifar10.tables import SCALES, TABLES
from conditions import Found, hardware, revision, today, versions, write_json
from filelock import FileLock

from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.run.records import read_rows

FORMAT = 1
USUAL_RANKS = 4  # of a row
START_SECONDS = 20.0  # to start ranks, to test the model and to write it
DECIDED = (
    "strategy", "model", "optimizer", "schedule", "lr", "clip_norm", "batch_size", "autocast", "ranks", "epochs",
    "seed",
)  # fmt: skip


def record(cell: Cell, summary: dict[str, Any], device: str) -> Found:
    """What is kept of a finished run."""
    settings, sent = cell.settings, summary["wire_bytes_by_purpose"]
    factored = next((one for one in summary["artifacts"] if one["name"] == "factored"), None)
    return {
        "key": cell.key, "scale": cell.scale, "row": label(cell), "tables": tables_with(cell), "task": settings["task"],
        **{name: settings[name] for name in DECIDED}, "nodes": summary["nodes"], "held_out": cell.held_out,
        "train": SCALES[cell.scale].train, "accuracy": summary["value"],
        "training_bytes_per_rank": round(bytes_of(sent, TRAINING) / summary["ranks"]),
        "training_bytes_between": bytes_of(sent, TRAINING, ("between",)), "parameters": summary["parameters"],
        "small_model": factored and {
            "parameters": factored["parameters"], "ratio": factored["ratio"], "accuracy": factored["value"],
        },
        "seconds": round(summary["seconds"], 1), "train_seconds": round(summary["train_seconds"], 1),
        "date": today(), "revision": revision(), "hardware": hardware(device), "versions": versions(),
        "command": cell.command,
    }  # fmt: skip


def label(cell: Cell, mark: str = "") -> str:
    """The row of a cell in words; `mark` is put around the strategy."""
    epochs, ranks = cell.settings["epochs"], cell.row.ranks
    images, usual = ranks * cell.settings["batch_size"], USUAL_RANKS * SCALES[cell.scale].batch_size
    others = [f"{epochs} epochs"] * (cell.row.epochs != 1) + ["one rank"] * (ranks == 1)
    others += [f"{images} images an update"] * (images != usual)
    others += [f"learning rate {cell.settings['lr']:g}"] * (cell.row.lr != 1)
    return ", ".join([f"{cell.model.name}: {mark}{cell.row.spec(cell.scale)}{mark}", *others])


def tables_with(cell: Cell) -> list[str]:
    """The tables that have a cell."""
    return [
        name
        for name in TABLES
        if cell.key in {one.key for one in cells(name, cell.scale, cell.seed + 1, cell.epochs, cell.tune)}
    ]


class Results:
    """A file of results. Each addition writes it anew; a result replaces an older one of the same cell.

    Several processes may add to one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, Found] = {}
        self.read()

    def read(self) -> None:
        """Read the file again: another process may have added to it."""
        if self.path.exists():
            content = json.loads(self.path.read_text())
            if content.get("format") != FORMAT:
                raise SystemExit(f"{self.path} has format {content.get('format')}, this program reads {FORMAT}")
            self.cells |= {one["key"]: one for one in content["cells"]}

    def add(self, *found: Found) -> None:
        """Add results. One that failed does not replace one that did not."""
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            self.read()
            for one in found:
                if "failed" not in one or "failed" in self.cells.get(one["key"], one):
                    self.cells[one["key"]] = one
            write_json(self.path, {"format": FORMAT, "cells": [self.cells[key] for key in sorted(self.cells)]})

    def finished(self, cell: Cell) -> Found | None:
        """The result of a cell, if it has one."""
        found = self.cells.get(cell.key)
        return None if found is None or "failed" in found else found

    def estimate(self, cell: Cell, out: Path) -> float:
        """Seconds that the rest of a cell will take: by its own epochs, by cells like it, or by the model's guess."""
        rows = read_rows(cell.folder(out).metrics)
        done = rows[-1]["epoch"] if rows else 0
        own = [rows[-1]["seconds"] / done] if rows else []
        known = [one for one in self.cells.values() if "failed" not in one and one["model"] == cell.model.spec]
        alike = [one for one in known if all(one[k] == cell.settings[k] for k in ("strategy", "ranks", "batch_size"))]
        others = [one["seconds"] / one["epochs"] for one in alike or known]
        each = statistics.median(own or others or [cell.model.epoch_seconds])
        return START_SECONDS + 1.1 * each * (cell.settings["epochs"] - done)
