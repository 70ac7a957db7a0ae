"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

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

REPORT_SECONDS = 0.25


class Progress(Protocol):
    """Told of every step and epoch."""

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None: ...
    def epoch(self, row: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def due(self) -> bool: ...
    def close(self) -> None: ...


class Silent:
    """For ranks other than the first."""

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None: ...
    def epoch(self, row: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def due(self) -> bool:
        return False

    def close(self) -> None: ...


class Shown:
    """A bar with loss, metric, speed, bytes and time left; without a terminal, a line now and then."""

    def __init__(self, metric: str, num_steps: int, start: int, num_epochs: int) -> None:
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

    def due(self) -> bool:
        """Is it time to show something? Asked first, because knowing the loss may make a GPU wait."""
        return time.monotonic() - self.last >= self.every_seconds

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None:
        self.last = time.monotonic()
        left = (self.last - self.begin) / max(step - self.start, 1) * (self.num_steps - step)
        speed = f"{samples_per_second:,.0f} samples/s  {format_bytes(wire_bytes)}"
        known = "" if loss is None else f"loss {loss:.4f}"
        status = f"{known}{self.value}  {speed}  {format_seconds(left)} left".strip()
        if self.bars.disable:
            print_line(f"step {step}/{self.num_steps}  {status}")
        else:
            self.bars.update(self.bar, completed=step, status=status)

    def epoch(self, row: dict[str, Any]) -> None:
        value = format_metric(row[f"test_{self.metric}"], self.metric)
        self.value = f"  {value}"
        self.say(
            f"epoch {row['epoch']}/{self.num_epochs}  loss {row['train_loss']:.4f}  {self.metric} {value}  "
            f"{row['samples_per_second']:,.0f} samples/s  {format_bytes(row['wire_bytes'])}  "
            f"{format_seconds(row['seconds'])}"
        )

    def say(self, text: str) -> None:
        if self.bars.disable:
            print_line(text)
        else:
            self.bars.console.print(text, highlight=False)

    def close(self) -> None:
        self.bars.stop()


class Reported:
    """For whoever started the run: the latest progress in a file, as JSON."""

    def __init__(self, file: Path, metric: str, num_steps: int, start: int, num_epochs: int) -> None:
        self.file = file
        self.metric = metric
        self.num_steps = num_steps
        self.last = 0.0
        self.value: float | None = None
        self.step(start, float("nan"), 0.0, 0)

    def due(self) -> bool:
        return time.monotonic() - self.last >= REPORT_SECONDS

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None:
        self.last = time.monotonic()
        status = {"step": step, "num_steps": self.num_steps, "value": self.value, "metric": self.metric}
        write_text(self.file, json.dumps(status))

    def epoch(self, row: dict[str, Any]) -> None:
        self.value = row[f"test_{self.metric}"]
        self.step(row["step"], row["train_loss"], 0.0, 0)

    def say(self, text: str) -> None: ...
    def close(self) -> None: ...
