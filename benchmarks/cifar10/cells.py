"""A cell of a table: one run of thinwire with one seed, its settings and its place in a folder."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cifar10.tables import SCALES, SCHEDULE, TABLES, TUNING_IMAGES, Model, Row, ScaleName

from thinwire.config import RunConfig
from thinwire.run.records import RunFolder

NODES = 2


@dataclass(frozen=True)
class Cell:
    """One run. `epochs` are those of a row of the usual length; `tune` tests on held-out training images."""

    scale: ScaleName
    row: Row
    seed: int
    epochs: int
    tune: bool = False

    @property
    def model(self) -> Model:
        return SCALES[self.scale].models[self.row.model]

    @property
    def held_out(self) -> int:
        """Training images that the model is tested on; 0: it is tested on the test set."""
        return SCALES[self.scale].held_out or (TUNING_IMAGES if self.tune else 0)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run that decide its result."""
        scale, row, model = SCALES[self.scale], self.row, self.model
        options = {"held_out": self.held_out or None, "train": scale.train}
        given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        return {
            "task": f"cifar10({given})" if given else "cifar10", "strategy": row.spec(self.scale),
            "model": model.spec, "epochs": max(1, round(row.epochs * self.epochs)),
            "batch_size": max(1, round(row.batch * scale.batch_size)), "lr": row.lr * model.lr,
            "optimizer": model.optimizer, "schedule": SCHEDULE, "clip_norm": model.clip_norm,
            "autocast": scale.autocast, "seed": self.seed, "ranks": row.ranks,
            "nodes": NODES if row.ranks > 1 else None,
        }  # fmt: skip

    @property
    def key(self) -> str:
        """A name for the folder of the run: readable, and different for different settings."""
        settings = self.settings
        words = (self.scale, settings["model"], settings["strategy"], "seed", self.seed)
        readable = re.sub(r"\W+", "-", " ".join(map(str, words))).strip("-")
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return f"{readable[:80].rstrip('-')}-{digest[:8]}"

    @property
    def command(self) -> str:
        """The command that repeats the run; its folders are up to the user."""
        words = ["thinwire", "train"]
        for name, value in self.settings.items():
            if value is not None and value is not False:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return f"{shlex.join(words)} --test-every 0 --data DIR --out DIR2"

    def folder(self, out: Path) -> RunFolder:
        """Where its run is."""
        return RunFolder(out / "cells" / self.key)

    def config(self, data: Path, out: Path, device: str) -> RunConfig:
        """The config of its run, or of the rest of it. The model is tested once, at the end."""
        folder = self.folder(out)
        return RunConfig(
            **self.settings, data=data, out=folder.path, device=device, test_every=0,
            strict=True, resume=folder.config.exists(),
        )  # fmt: skip


def cells(table: str, scale: ScaleName, seeds: int, epochs: int | None = None, tune: bool = False) -> Iterator[Cell]:
    """The cells of a table; with `tune` also those of its candidates."""
    own = TABLES[table]
    for row in own.rows + (own.candidates if tune else []):
        for seed in range(seeds):
            yield Cell(scale, row, seed, epochs or SCALES[scale].epochs, tune)
