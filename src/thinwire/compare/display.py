"""What a user sees while a comparison runs: a live table in a terminal; elsewhere two lines for each run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from thinwire.common.formats import format_metric, format_seconds
from thinwire.common.messages import print_line
from thinwire.compare.comparison import Job
from thinwire.compare.results import Record, Results
from thinwire.compare.terminal_table import comparison_table


class Display:
    """The progress of a comparison, shown on standard error.

    Call begin() and end() around each run. The run itself writes how far it is into `progress_file`. `read` reads the
    results so far. `may_follow` says that a baseline may be run after the jobs.
    """

    def __init__(self, jobs: list[Job], read: Callable[[], Results], progress_file: Path, may_follow: bool) -> None:
        self.jobs = jobs
        self.read = read
        self.progress_file = progress_file
        self.may_follow = may_follow
        self.results = read()
        self.job: Job | None = None  # the current one
        self.began = 0.0
        self.first_progress: tuple[float, float] | None = None  # of the current run: time, and share that was done
        self.took: dict[str, list[float]] = {}  # spec → seconds of the runs that have ended
        self.console = Console(stderr=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the live table inside the block, if standard error is a terminal."""
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
        """Add jobs to those that are to be done."""
        self.jobs, self.results, self.may_follow = [*self.jobs, *jobs], self.read(), False

    def begin(self, job: Job) -> None:
        """Call before a run."""
        self.progress_file.unlink(missing_ok=True)
        self.job, self.began, self.first_progress = job, time.monotonic(), None
        self._print(f"run {self.jobs.index(job) + 1} of {len(self.jobs)}: {job.spec}, seed {job.seed}")

    def end(self) -> None:
        """Call after a run, whether it finished or failed."""
        assert self.job is not None
        self.took.setdefault(self.job.spec, []).append(time.monotonic() - self.began)
        self.results = self.read()
        record = self._record(self.job)
        self.job = None
        if record.summary is None:
            outcome = f"failed: {(record.error or '').splitlines()[0]}"
        else:
            value = format_metric(record.summary["value"], record.summary["metric"])
            outcome = f"{record.summary['metric']} {value} in {format_seconds(record.summary['train_seconds'])}"
        self._print(f"  {outcome}; {self._time_left()}")

    def _table(self) -> Table:
        states = {entry.spec: self._state(entry.spec) for entry in self.results.entries}
        table = comparison_table(self.results, self.console.width, states)
        table.caption, table.caption_justify = self._time_left(), "left"
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
        """The share of the current run that is done."""
        try:
            progress = json.loads(self.progress_file.read_text())
        except (OSError, ValueError):
            return 0.0
        return float(progress["step"] / max(progress["num_steps"], 1))

    def _time_left(self) -> str:
        """The time left, estimated from earlier runs: those of the same strategy, or of all if it has none."""
        to_do = [job for job in self.jobs if job != self.job and self._is_to_do(job)]
        current = self._current_time_left() if self.job else 0.0
        known = [seconds for times in self.took.values() for seconds in times]
        if self.job and current is not None:
            known.append(time.monotonic() - self.began + current)
        if not to_do and not self.job:
            return "all done" + ", unless a baseline follows" * self.may_follow
        if current is None or not known:
            number = len(to_do) + (self.job is not None)
            return f"{number} run{'s' * (number != 1)} to do"
        typical = sum(known) / len(known)
        means = {spec: sum(times) / len(times) for spec, times in self.took.items()}
        return f"about {format_seconds(1 + round(current + sum(means.get(job.spec, typical) for job in to_do)))} left"

    def _current_time_left(self) -> float | None:
        """Seconds left of the current run, from its speed since training began; before that, from earlier runs."""
        assert self.job is not None
        now, share = time.monotonic(), self._share()
        if share > 0 and self.first_progress is None:
            self.first_progress = now, share
        if self.first_progress is not None and share > self.first_progress[1]:
            begin, from_share = self.first_progress
            return (now - begin) / (share - from_share) * (1 - share)
        times = self.took.get(self.job.spec) or [seconds for times in self.took.values() for seconds in times]
        return max(0.0, sum(times) / len(times) - (now - self.began)) if times else None

    def _is_to_do(self, job: Job) -> bool:
        record = self._record(job)
        return record.summary is None and record.error is None

    def _record(self, job: Job) -> Record:
        entry = next(e for e in self.results.entries if e.spec == job.spec)
        return next(r for r in entry.records if r.seed == job.seed)

    def _print(self, text: str) -> None:
        if not self.console.is_terminal:
            print_line(text)
