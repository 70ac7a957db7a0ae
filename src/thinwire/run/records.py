"""The folder of a run: config.toml; metrics, ledger and timeline as .jsonl; summary.json; checkpoints; models."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.common.files import write_text
from thinwire.common.json_text import parse_json
from thinwire.config import RunConfig, make_config, read_toml
from thinwire.errors import RunError, UsageError
from thinwire.run.locks import LOCK, FolderLock, State
from thinwire.run.schema import ReadRow, ReadSpan, parsed

TIMELINE = "timeline.jsonl"
LOCK_SECONDS = 5.0  # in which processes of a run that was killed have ended


class RunFolder:
    """The files of one run. Only rank 0 writes them, except for checkpoints, which every rank writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.timeline = path / TIMELINE
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.membership = path / "membership.jsonl"  # of an elastic run
        self.is_held = False  # by rank 0 of this run, so no other run writes to it
        self._lock = FolderLock(path)

    @staticmethod
    def new(config: RunConfig) -> RunFolder:
        """A folder for a new run: --out, which need not be there, or one that is made. UsageError if a run is in it."""
        folder = RunFolder(config.out or _new_folder(config))
        if folder.path.exists() and not folder.path.is_dir():
            raise UsageError(f"--out {folder.path} is a file; give a folder")
        folder.refuse_used()
        parent = next(p for p in (folder.path, *folder.path.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UsageError(f"cannot make --out {folder.path}: {parent} is not a folder that can be written to")
        return folder

    def refuse_used(self) -> None:
        """Raise UsageError if there is a run in this folder: one that goes on, if another process holds the folder."""
        if self.config.exists():
            if self._is_taken():
                raise self._taken_error()
            raise UsageError(f"{self.path} holds a run already; add --resume to continue it, or give another --out")
        files = (self.metrics, self.ledger, self.timeline, self.summary, self.checkpoints)
        for file in (*files, self.path / "model", *self.path.glob("*.safetensors")):
            if file.exists():
                raise UsageError(f"{self.path} holds {file.name} of a run without config.toml; give another --out")

    @staticmethod
    def existing(path: Path | None) -> RunFolder:
        """The folder of a run to resume."""
        if path is None:
            raise UsageError("--resume needs --out, the folder of the run to continue")
        folder = RunFolder(path)
        if not folder.config.exists():
            new = "add the settings of a new run, as --task" if is_free(path) else "give another --out for a new run"
            raise UsageError(f"{path} holds no run (no config.toml); check --out{_similar_run(path)}, or {new}")
        return folder

    def hold(self) -> None:
        """Keep other runs out of this folder, which is made if there is none, until `release` or the process ends.

        UsageError if another run writes to it. Where it cannot be locked, a warning is printed, and nothing is swept.
        """
        end = time.monotonic() + LOCK_SECONDS
        while (state := self._take()) == "taken":
            if time.monotonic() > end:
                raise self._taken_error()
            time.sleep(0.05)
        self.is_held = state == "held"
        if self.is_held:
            self._sweep()

    def _take(self) -> State:
        _make(self.path)
        return self._lock.take()

    def _is_taken(self) -> bool:
        if self.is_held or not self._lock.path.exists():
            return False
        if (state := self._lock.take()) == "held":
            self._lock.release()
        return state == "taken"

    def _taken_error(self) -> UsageError:
        return UsageError(
            f"another run writes to {self.path}; wait until it has ended, or end it, or give another --out"
        )

    def _sweep(self) -> None:
        """Remove what was not written to its end, because the process was killed: nobody else writes here now."""
        texts = (self.config, self.metrics, self.ledger, self.timeline, self.summary, self.membership)
        own = (*texts, self.path / "model")
        for scrap in self.path.glob(".*.new"):
            written = re.fullmatch(r"\.(.+)\.\d+\.new", scrap.name)
            if written and (self.path / written[1] in own or written[1].endswith(".safetensors")):
                shutil.rmtree(scrap) if scrap.is_dir() else scrap.unlink(missing_ok=True)

    def release(self) -> None:
        """Let other runs use the folder."""
        self._lock.release()

    def save_config(self, config: RunConfig) -> None:
        write_text(self.config, config.to_toml())

    def remove_if_empty(self) -> None:
        """Remove the folder if a run failed before its first checkpoint, so that it can be started again."""
        own = (self.config, self.metrics)  # rows within the first epoch
        if self.path.is_dir() and {p.name for p in self.path.iterdir()} <= {LOCK, *(file.name for file in own)}:
            for file in own:
                file.unlink(missing_ok=True)
            self.release()
            with suppress(OSError):  # another rank has removed it, or another run has begun in it
                self.path.rmdir()

    def load_config(self) -> RunConfig:
        return make_config(read_toml(self.config), source=str(self.config))

    def append(self, file: Path, rows: list[dict[str, Any]]) -> None:
        """Add lines to a .jsonl file. `read_rows` ignores a line that a crash left incomplete."""
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write("".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            raise RunError(f"cannot write {file}: {error.strerror}; free some space and --resume") from error

    def add_to_last_row(self, values: dict[str, Any]) -> None:
        """Add values to the last row of metrics: those of a test at the end of the run."""
        rows = read_rows(self.metrics)
        for row in rows[-1:]:
            row.update(values)
        _write_rows(self.metrics, rows)

    def append_ledger(self, where: dict[str, Any], ledgers: list[list[dict[str, Any]]], final: bool = False) -> None:
        """Add the totals of all ranks: after an epoch, or the final ones, which add up to the summary."""
        where = {**where, "final": True} if final else where
        rows = [{**where, "rank": rank, **line} for rank, ledger in enumerate(ledgers) for line in ledger]
        self.append(self.ledger, rows)

    def drop_rows_after(self, step: int) -> None:
        """Drop the rows of steps that a resumed run will repeat, and the final rows: it will write new ones."""
        for file in (self.metrics, self.ledger, self.timeline):
            _write_rows(file, [row for row in read_rows(file) if row["step"] <= step and not row.get("final")])

    def save_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.summary, json.dumps(summary, indent=2) + "\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a .jsonl file; none if there is no file."""
    rows = []
    model = ReadSpan if file.name == TIMELINE else ReadRow
    lines = file.read_bytes().splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            parse_json(line)
        except ValueError:
            continue  # incomplete: the run was stopped while it wrote this line
        rows.append(parsed(model, line.decode(), f"line {number} of {file}"))
    return rows


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def is_free(path: Path) -> bool:
    """Whether there is nothing at a path, or a folder without files, or with no more than a killed run's lock."""
    return not path.exists() or (path.is_dir() and all(file.name == LOCK for file in path.iterdir()))


def _similar_run(path: Path) -> str:
    """The folder of a run with a similar name, as a question to the user; empty if there is none."""
    runs = [config.parent.name for config in path.parent.glob("*/config.toml")]
    similar = difflib.get_close_matches(path.name, runs, n=1)
    return f" (did you mean {path.parent / similar[0]}?)" if similar else ""


def _make(folder: Path, exist_ok: bool = True) -> bool:
    """Make a folder; False if there is one, or anything else with its name, and it must be new."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if not exist_ok and os.path.lexists(folder):
            return False
        raise RunError(f"cannot make --out {folder}: {error.strerror}; choose another --out") from error
    return True


def _new_folder(config: RunConfig) -> Path:
    """Make a folder with a name that is free. Runs that begin at the same time get different ones."""
    words = (re.findall(r"\w+", text.rpartition(":")[2]) or ["run"] for text in (config.task, config.strategy))
    stem = "-".join(word[0] for word in words)
    return next(p for i in itertools.count(1) if _make(p := Path("runs") / f"{stem}-{i}", exist_ok=False))
