"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table


class Progress(Protocol):
    """Told of every step and epoch."""

    def step(self, step: int, loss: float, samples_per_second: float, wire_bytes: int) -> None: ...
    def epoch(self, row: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def due(self) -> bool: ...
    def close(self) -> None: ...


class Silent:
    """For ranks other than the first."""

    def step(self, step: int, loss: float, samples_per_second: float, wire_bytes: int) -> None: ...
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

    def step(self, step: int, loss: float, samples_per_second: float, wire_bytes: int) -> None:
        self.last = time.monotonic()
        left = (self.last - self.begin) / max(step - self.start, 1) * (self.num_steps - step)
        speed = f"{samples_per_second:,.0f} samples/s  {size(wire_bytes)}"
        news = f"loss {loss:.4f}{self.value}  {speed}  {clock(left)} left"
        if self.bars.disable:
            self._line(f"step {step}/{self.num_steps}  {news}")
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
            self._line(text)
        else:
            self.bars.console.print(text, highlight=False)

    def close(self) -> None:
        self.bars.stop()

    @staticmethod
    def _line(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def result_table(summary: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    """The end of a run: what it reached, and what each purpose sent in what time."""
    value = show(summary["value"], summary["metric"])
    ranks = f"{summary['ranks']} rank{'s' * (summary['ranks'] != 1)}"
    title = f"{summary['task']} · {summary['strategy']} · {ranks} · {summary['metric']} {value}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.padding, table.collapse_padding = (0, 1), True
    table.caption = (
        f"{clock(summary['seconds'])} in all, {clock(summary['train_seconds'])} of it training; "
        f"{summary['parameters']:,} parameters\n"
        f"a rank sent {size(summary['wire_bytes_per_rank'])} on average; the rows are rank 0's"
    )
    for heading in ("purpose", "link", "operation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "calls", "payload", "wire", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row["wire_bytes"]):
        numbers = (f"{row['calls']:,}", size(row["payload_bytes"]), size(row["wire_bytes"]), clock(row["seconds"]))
        table.add_row(row["purpose"], row["link"], row["op"], str(row["ranks"]), *numbers)
    return table


def show(value: float, metric: str) -> str:
    """A metric as people write it."""
    return f"{value:.2f} %" if metric == "accuracy" else f"{value:.4f}"


def size(num_bytes: float) -> str:
    """Bytes with a fitting unit.

    >>> size(999), size(1234), size(5_600_000), size(128_000_000_000)
    ('999 B', '1.23 kB', '5.60 MB', '128 GB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:.{digits}f} {units[0]}"


def clock(seconds: float) -> str:
    """A duration with a fitting unit.

    >>> clock(0.004), clock(4.26), clock(75), clock(7300)
    ('4 ms', '4.3 s', '1:15', '2:01:40')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
