"""A comparison as it goes on: a live table in a terminal, a line or two for each run elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from thinwire.common.formats import format_metric, format_seconds
from thinwire.common.messages import print_line
from thinwire.compare.results import Record, Results
from thinwire.compare.tables import comparison_table


class Job(NamedTuple):
    """One run of a comparison, and its folder within that of the comparison."""

    spec: str
    seed: int
    place: str


class Display:
    """Told when runs begin and end; a run that is under way tells how far it is in the file `progress_file`."""

    def __init__(self, jobs: list[Job], read: Callable[[], Results], progress_file: Path, may_follow: bool) -> None:
        self.jobs = jobs
        self.read = read
        self.progress_file = progress_file
        self.may_follow = may_follow  # a baseline, after these runs
        self.results = read()
        self.job: Job | None = None
        self.began = 0.0
        self.first_progress: tuple[float, float] | None = (
            None  # when the present run began to train, and how far it was
        )
        self.took: dict[str, list[float]] = {}  # spec → seconds of runs that ended
        self.console = Console(stderr=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it inside the block."""
        if not self.console.is_terminal:
            yield
            return
        live = Live(console=self.console, get_renderable=self._table, refresh_per_second=4, transient=True)
        live.start()
        try:
            yield
        finally:
            with suppress(OSError):  # the terminal may be gone
                live.stop()

    def add(self, jobs: list[Job]) -> None:
        """More runs are to be done than there were at first."""
        self.jobs, self.results, self.may_follow = [*self.jobs, *jobs], self.read(), False

    def begin(self, job: Job) -> None:
        """A run begins."""
        self.progress_file.unlink(missing_ok=True)
        self.job, self.began, self.first_progress = job, time.monotonic(), None
        self._say(f"run {self.jobs.index(job) + 1} of {len(self.jobs)}: {job.spec}, seed {job.seed}")

    def end(self) -> None:
        """The run has ended, well or not."""
        assert self.job is not None
        self.took.setdefault(self.job.spec, []).append(time.monotonic() - self.began)
        self.results = self.read()
        record = self._record(self.job)
        self.job = None
        if record.summary is None:
            found = f"failed: {(record.error or '').splitlines()[0]}"
        else:
            value = format_metric(record.summary["value"], record.summary["metric"])
            found = f"{record.summary['metric']} {value} in {format_seconds(record.summary['train_seconds'])}"
        self._say(f"  {found}; {self._left()}")

    def _table(self) -> Table:
        states = {entry.spec: self._state(entry.spec) for entry in self.results.entries}
        table = comparison_table(self.results, self.console.width, states)
        table.caption, table.caption_justify = self._left(), "left"
        return table

    def _state(self, spec: str) -> str:
        entry = next(e for e in self.results.entries if e.spec == spec)
        state = f"{len(entry.finished)}/{len(entry.records)}"
        if entry.errors:
            state += f", {len(entry.errors)} failed"
        if self.job is not None and self.job.spec == spec:
            state += f", seed {self.job.seed}: {100 * self._share():.0f} %"
        return state

    def _share(self) -> float:
        """How much of the present run is done."""
        try:
            progress = json.loads(self.progress_file.read_text())
        except (OSError, ValueError):
            return 0.0
        return float(progress["step"] / max(progress["num_steps"], 1))

    def _left(self) -> str:
        """The time that is left, from what runs took: of the same strategy where there are any."""
        to_do = [job for job in self.jobs if job != self.job and self._is_open(job)]
        present = self._present_left() if self.job else 0.0
        known = [seconds for times in self.took.values() for seconds in times]
        if self.job and present is not None:
            known.append(time.monotonic() - self.began + present)
        if not to_do and not self.job:
            return "all done" + ", unless a baseline follows" * self.may_follow
        if present is None or not known:
            number = len(to_do) + (self.job is not None)
            return f"{number} run{'s' * (number != 1)} to do"
        typical = sum(known) / len(known)
        means = {spec: sum(times) / len(times) for spec, times in self.took.items()}
        return f"about {format_seconds(1 + round(present + sum(means.get(job.spec, typical) for job in to_do)))} left"

    def _present_left(self) -> float | None:
        """Seconds that the present run needs still: from its pace since it trains, else from runs before it."""
        assert self.job is not None
        now, share = time.monotonic(), self._share()
        if share > 0 and self.first_progress is None:
            self.first_progress = now, share
        if self.first_progress is not None and share > self.first_progress[1]:
            begin, from_share = self.first_progress
            return (now - begin) / (share - from_share) * (1 - share)
        times = self.took.get(self.job.spec) or [seconds for times in self.took.values() for seconds in times]
        return max(0.0, sum(times) / len(times) - (now - self.began)) if times else None

    def _is_open(self, job: Job) -> bool:
        record = self._record(job)
        return record.summary is None and record.error is None

    def _record(self, job: Job) -> Record:
        entry = next(e for e in self.results.entries if e.spec == job.spec)
        return next(r for r in entry.records if r.seed == job.seed)

    def _say(self, text: str) -> None:
        if not self.console.is_terminal:
            print_line(text)
