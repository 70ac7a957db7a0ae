"""The progress of a run: a bar in a terminal, plain lines elsewhere, or a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from thinwire.common.files import write_text
from thinwire.common.formats import format_bytes, format_metric, format_seconds
from thinwire.common.messages import print_line

FILE_SECONDS = 0.25  # between two writes of the file


class Progress(Protocol):
    """Shows the progress of a run. `step` is called only if `is_due`, because reading a loss may wait for a GPU."""

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None: ...
    def row(self, row: dict[str, Any]) -> None: ...
    def is_due(self) -> bool: ...
    def close(self) -> None: ...


class NoProgress:
    """Shows nothing: for ranks other than 0."""

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None: ...
    def row(self, row: dict[str, Any]) -> None: ...
    def is_due(self) -> bool:
        return False

    def close(self) -> None: ...


class ProgressBar:
    """A bar with loss, metric, speed, bytes and time left; without a terminal, a line every few seconds."""

    def __init__(self, metric: str, num_steps: int, start: int, num_epochs: int | None) -> None:
        self.console = Console(stderr=True)
        self.metric = metric
        self.num_steps = num_steps
        self.num_epochs = num_epochs
        self.start = start
        self.begin = self.last = time.monotonic()
        self.every_seconds = 0.2 if self.console.is_terminal else 5.0
        self.value = ""
        columns = (BarColumn(bar_width=8), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        self.bars = Bars(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.bar = self.bars.add_task("", total=num_steps, completed=start, status="starting")
        self.bars.start()

    def is_due(self) -> bool:
        return time.monotonic() - self.last >= self.every_seconds

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None:
        self.last = time.monotonic()
        left = (self.last - self.begin) / max(step - self.start, 1) * (self.num_steps - step)
        speed = f"{samples_per_second:,.0f} samples/s  {format_bytes(wire_bytes)}"
        loss_text = "" if loss is None else f"loss {loss:.4f}"
        status = f"{loss_text}{self.value}  {speed}  {format_seconds(left)} left".strip()
        if self.bars.disable:
            print_line(f"step {step}/{self.num_steps}  {status}")
        else:
            self.bars.update(self.bar, completed=step, status=status)

    def row(self, row: dict[str, Any]) -> None:
        """A row of metrics: after an epoch, or within, where only a test is shown."""
        value = row.get(f"test_{self.metric}")
        shown = "" if value is None else format_metric(value, self.metric)
        tested = shown and f"{self.metric} {shown}  "
        if "train_loss" not in row:
            self.value = f"  {shown}" if shown else self.value
            if shown:
                self._print(f"step {row['step']}/{self.num_steps}  {tested}".strip())
            return
        self.value = shown and f"  {shown}"
        of_all = f"/{self.num_epochs}" if self.num_epochs else ""
        self._print(
            f"epoch {row['epoch']}{of_all}  loss {row['train_loss']:.4f}  {tested}"
            f"{row['samples_per_second']:,.0f} samples/s  {format_bytes(row['wire_bytes'])}  "
            f"{format_seconds(row['seconds'])}"
        )

    def _print(self, text: str) -> None:
        if self.bars.disable:
            print_line(text)
        else:
            self.bars.console.print(text, highlight=False)

    def close(self) -> None:
        self.bars.stop()


class ProgressFile:
    """Writes the latest progress to a file, as JSON, for the program that started the run."""

    def __init__(self, file: Path, metric: str, num_steps: int, start: int, num_epochs: int | None) -> None:
        self.file = file
        self.metric = metric
        self.num_steps = num_steps
        self.last = 0.0
        self.value: float | None = None
        self.step(start, float("nan"), 0.0, 0)

    def is_due(self) -> bool:
        return time.monotonic() - self.last >= FILE_SECONDS

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None:
        self.last = time.monotonic()
        status = {"step": step, "num_steps": self.num_steps, "value": self.value, "metric": self.metric}
        write_text(self.file, json.dumps(status))

    def row(self, row: dict[str, Any]) -> None:
        self.value = row.get(f"test_{self.metric}", None if "train_loss" in row else self.value)
        self.step(row["step"], None, 0.0, 0)

    def close(self) -> None: ...
