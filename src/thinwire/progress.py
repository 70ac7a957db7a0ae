"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from thinwire.records import write_text
from thinwire.tables import clock, show, size

REPORT_SECONDS = 0.25


def say(text: str) -> None:
    """A line of news on standard error. Where nobody reads it any more, the work goes on in silence."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_once(text: str) -> None:
    """The same, but only the first time in this process."""
    if text not in _said:
        _said.add(text)
        say(f"thinwire: {text}")


_said: set[str] = set()


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
        columns = (BarColumn(bar_width=8), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
        self.bars = Bars(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.bar = self.bars.add_task("", total=num_steps, completed=start, news="starting")
        self.bars.start()

    def due(self) -> bool:
        """Is it time to show something? Asked first, because knowing the loss may make a GPU wait."""
        return time.monotonic() - self.last >= self.every_seconds

    def step(self, step: int, loss: float | None, samples_per_second: float, wire_bytes: int) -> None:
        self.last = time.monotonic()
        left = (self.last - self.begin) / max(step - self.start, 1) * (self.num_steps - step)
        speed = f"{samples_per_second:,.0f} samples/s  {size(wire_bytes)}"
        known = "" if loss is None else f"loss {loss:.4f}"
        news = f"{known}{self.value}  {speed}  {clock(left)} left".strip()
        if self.bars.disable:
            say(f"step {step}/{self.num_steps}  {news}")
        else:
            self.bars.update(self.bar, completed=step, news=news)

    def epoch(self, row: dict[str, Any]) -> None:
        value = show(row[f"test_{self.metric}"], self.metric)
        self.value = f"  {value}"
        self.say(
            f"epoch {row['epoch']}/{self.num_epochs}  loss {row['train_loss']:.4f}  {self.metric} {value}  "
            f"{row['samples_per_second']:,.0f} samples/s  {size(row['wire_bytes'])}  {clock(row['seconds'])}"
        )

    def say(self, text: str) -> None:
        if self.bars.disable:
            say(text)
        else:
            self.bars.console.print(text, highlight=False)

    def close(self) -> None:
        self.bars.stop()


class Reported:
    """For whoever started the run: the latest news in a file, as JSON."""

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
        news = {"step": step, "num_steps": self.num_steps, "value": self.value, "metric": self.metric}
        write_text(self.file, json.dumps(news))

    def epoch(self, row: dict[str, Any]) -> None:
        self.value = row[f"test_{self.metric}"]
        self.step(row["step"], row["train_loss"], 0.0, 0)

    def say(self, text: str) -> None: ...
    def close(self) -> None: ...
