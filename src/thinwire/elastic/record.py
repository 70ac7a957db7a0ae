"""membership.jsonl: for each committed round who made it and what each trained. A run can be repeated from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.common.files import add_text, write_text


@dataclass(frozen=True)
class Row:
    """A committed round."""

    round: int
    began: list[int]  # who began it, in the order that decides who trains which samples
    members: list[int]  # who committed it, in the order of their group
    joined: list[int]  # those of `began` who had just come
    lost: dict[str, str]  # id → why
    samples: dict[str, int]  # id → that it trained, for each of `began`
    epoch: int
    given: int  # samples of the epoch that were given out before
    step: int  # steps of the epoch before
    lr_factor: float  # of the learning rate in the last step
    checksums: dict[str, int] = field(default_factory=dict)  # of what all agree on afterwards
    resumed: dict[str, int] = field(default_factory=dict)  # id → the id that this rank had before it was resumed
    heirs: dict[str, int] = field(default_factory=dict)  # id of one who joined → the lost member that gave it its state

    @property
    def lost_samples(self) -> int:
        """Samples that were given to ranks which were lost: they are not trained in this epoch."""
        return sum(count for one, count in self.samples.items() if int(one) not in self.members)

    @property
    def weights(self) -> dict[int, float]:
        """The share of each member in the mean."""
        total = sum(self.samples[str(one)] for one in self.members)
        return {one: self.samples[str(one)] / total if total else 1 / len(self.members) for one in self.members}


class Record:
    """The rows of a run, in memory and, with a path, in a file."""

    def __init__(self, path: Path | None = None, rows: Sequence[Row] = ()) -> None:
        self.path, self.rows = path, list(rows)

    @staticmethod
    def read(path: Path) -> Record:
        """The record in a file; a line that a crash left incomplete is dropped."""
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                rows.append(Row(**json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                break
        return Record(path, rows)

    def add(self, row: Row) -> None:
        """Add a round."""
        self.rows.append(row)
        if self.path is not None:
            add_text(self.path, json.dumps(asdict(row)) + "\n")

    def replace(self, rows: Sequence[Row]) -> None:
        """Go on from these rounds: those before a rank joined, or before its checkpoint."""
        self.rows = list(rows)
        if self.path is not None and (self.rows or self.path.exists()):
            write_text(self.path, "".join(json.dumps(asdict(row)) + "\n" for row in self.rows))

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as plain values."""
        return [asdict(row) for row in self.rows]
