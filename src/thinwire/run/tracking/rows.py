"""Hands the rows of metrics to a tracker, each once, on rank 0."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from thinwire.common.files import write_text
from thinwire.common.messages import print_line
from thinwire.run.records import RunFolder, read_rows
from thinwire.run.tracking.base import About, Tracker, numbers, open_tracker


class TrackedRows:
    """The rows of a run for one tracker.

    The file `tracking.json` has the step of the last row that was handed over. A run that was stopped repeats the steps
    after its last checkpoint; their rows are not handed over again. Before the first checkpoint nothing is: a run that
    fails there leaves nothing behind. If the tracker fails, a warning says so, and the run goes on without it.
    """

    def __init__(self, tracker: str, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        self.name, self.folder, self.settings = tracker, folder, settings
        self.file = folder.path / "tracking.json"
        self.state = _read(self.file).get(tracker) or {"id": uuid.uuid4().hex[:8], "step": 0, "is_tested": True}
        self.rows = [row for row in read_rows(folder.metrics) if row["step"] > self.state["step"]]
        self.has_checkpoint = folder.checkpoints.exists()
        self.tracker: Tracker | None = None
        self.has_failed = False

    def add(self, row: dict[str, Any]) -> None:
        """A new row, or one that was handed over before the run was stopped."""
        if row["step"] > self.state["step"]:
            self.rows.append(row)
        if self.has_checkpoint:
            self.hand_over()

    def hand_over(self) -> None:
        """Give the tracker the rows so far; there is a checkpoint."""
        self.has_checkpoint = True
        rows, self.rows = self.rows, []
        if rows:
            is_tested = any(name.startswith("test_") for name in rows[-1])
            self._do(lambda: self._write(rows, {"step": rows[-1]["step"], "is_tested": is_tested}))

    def finish(self) -> None:
        """The run has ended: give the tracker what the last test found, if that came later, and close it."""
        last = next(iter(read_rows(self.folder.metrics)[-1:]), {})
        tests = {name: value for name, value in last.items() if name.startswith("test_")}
        if tests and not self.state["is_tested"]:
            self._do(lambda: self._write([{"step": last["step"], **tests}], {"is_tested": True}))
        self.close(is_complete=True)

    def close(self, is_complete: bool = False) -> None:
        """End the tracker's own processes and threads."""
        if self.tracker is not None:
            tracker, self.tracker = self.tracker, None
            self._do(lambda: tracker.close(is_complete))

    def _write(self, rows: list[dict[str, Any]], after: dict[str, Any]) -> None:
        if self.tracker is None:
            about = About(self.folder.path, self.state["id"], self.state["step"] == 0, self.settings)
            self.tracker = open_tracker(self.name, about)
        self.state |= after  # kept before rows are written, so that a crash in between does not write them twice
        write_text(self.file, json.dumps({**_read(self.file), self.name: self.state}) + "\n")
        for row in rows:
            self.tracker.write(row["step"], numbers(row))

    def _do(self, action: Callable[[], None]) -> None:
        if self.has_failed:
            return
        try:
            action()
        except Exception as error:
            self.has_failed = True
            failed, self.tracker = self.tracker, None
            if failed is not None:
                with suppress(Exception):
                    failed.close(is_complete=False)
            print_line(
                f"warning: --track {self.name} failed ({type(error).__name__}: {error}); the run goes on without it. "
                f"All rows are in {self.folder.metrics}"
            )


def _read(file: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}
