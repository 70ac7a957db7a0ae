"""Compare strategies: the same task, data order, initial weights and seeds for each, one run after the other."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from thinwire.comm.world import find_world
from thinwire.common.files import scratch_folder, write_text
from thinwire.common.messages import print_line, say
from thinwire.compare import baseline
from thinwire.compare.baseline import Decision
from thinwire.compare.display import Display, Job
from thinwire.compare.report import write_report
from thinwire.compare.results import (
    FORMAT,
    Results,
    holds_comparison,
    read_comparison_file,
    read_results,
    read_summary,
    run_place,
)
from thinwire.compare.tables import comparison_lines, comparison_table
from thinwire.compare.verdicts import as_json
from thinwire.config import CompareConfig
from thinwire.errors import RunError, Stopped, ThinwireError, UsageError, invalid
from thinwire.launch.agent import start_ranks
from thinwire.launch.launcher import stopped_by_signals
from thinwire.launch.settings import check_names, check_options
from thinwire.netlab import Lab
from thinwire.run.network import check_network, network
from thinwire.run.records import RunFolder, is_free
from thinwire.spec import parse

WIDE = 200
MAY_CHANGE = {"out", "resume", "target", "baseline", "data", "strict", "keep", "restarts"}  # when it is resumed


def compare(specs: list[str], asked: dict[str, Any]) -> Results:
    """Run every strategy with every seed, show a table, write results.json and report.html."""
    world = find_world()
    if world is not None and world.size > 1:
        raise UsageError("compare starts ranks on this machine; run it alone, not under torchrun, srun or mpirun")
    Comparison.begun(specs, asked)  # a mistake is told at once
    with stopped_by_signals(), alone_on_this_machine():
        comparison = Comparison.begun(specs, asked)  # now that nobody else can take the same folder
        comparison.run()
        return comparison.finish()


class Comparison:
    """A comparison and its folder: compare.json, results.json, report.html, and a run folder for each job."""

    def __init__(
        self, specs: list[str], config: CompareConfig, folder: Path, command: str, decided: Decision | None = None
    ) -> None:
        check_network(config)
        self.baseline = baseline.at_first(config, specs, decided)
        self.specs = [*specs, baseline.SPEC] if self.baseline and self.baseline.run else specs
        self.config = config
        self.folder = folder
        self.command = command
        self.errors: dict[str, str] = {}  # by place
        self.seeds = list(range(config.seed, config.seed + config.seeds))
        self.jobs = self._jobs_of(self.specs)
        for check in (check_names, check_options):  # all names first: that takes no torch
            for spec in self.specs:
                check(config.run(spec, 0, folder, resume=False))

    @staticmethod
    def begun(specs: list[str], asked: dict[str, Any]) -> Comparison:
        """The comparison that is asked for: a new one, also where --resume finds none yet, or the one in --out."""
        if asked.get("resume") and asked.get("out") is not None and specs and is_free(Path(asked["out"])):
            say(f"no comparison in {asked['out']} yet: starting one", once=True)
            return Comparison.new(specs, {**asked, "resume": False})
        return (Comparison.resumed if asked.get("resume") else Comparison.new)(specs, asked)

    @staticmethod
    def new(specs: list[str], asked: dict[str, Any]) -> Comparison:
        """A comparison that begins; a folder that holds something already is refused."""
        config = CompareConfig(**asked)
        folder = config.out or next(p for i in range(1, 10**6) if not (p := Path(f"runs/compare-{i}")).exists())
        if folder.is_dir() and any(folder.iterdir()):
            resume = "add --resume to go on with it, or " if holds_comparison(folder) else ""
            what = "a comparison" if resume else "other things"
            raise UsageError(f"{folder} holds {what} already; {resume}give another --out")
        RunFolder.new(config.run("", 0, folder, resume=False))
        return Comparison(_distinct(specs), config, folder, _command(specs, asked))

    @staticmethod
    def resumed(specs: list[str], asked: dict[str, Any]) -> Comparison:
        """The comparison in --out, to go on with."""
        if asked.get("out") is None:
            raise UsageError("--resume needs --out, the folder of the comparison to go on with")
        folder = Path(asked["out"])
        if not holds_comparison(folder):
            new = "give the strategies of a new one too" if is_free(folder) else "give another for a new one"
            raise UsageError(f"{folder} holds no comparison (no compare.json); check --out, or {new}")
        about = read_comparison_file(folder)
        try:
            decided = Decision.model_validate(about["baseline"]) if about.get("baseline") else None
            saved = CompareConfig(**{"baseline": "none", **about.get("settings", {})})  # older ones have none
        except ValidationError as error:
            raise invalid(error, str(folder / "compare.json")) from None
        given = about["specs"][:-1] if decided and decided.run else about["specs"]
        if specs and _distinct(specs) != given:
            raise UsageError(f"{folder} compares {', '.join(given)}; leave the strategies out to resume it")
        for name, value in asked.items():
            if name not in MAY_CHANGE and value != getattr(saved, name):
                option = name.replace("_", "-")
                raise UsageError(f"{folder} was begun with --{option} {getattr(saved, name)}; leave out --{option}")
        changes = {name: value for name, value in asked.items() if name in MAY_CHANGE}
        config = saved.model_copy(update=changes)
        comparison = Comparison(given, config, folder, about["command"], decided)
        comparison.errors = about["errors"]
        return comparison

    # ---- running

    def run(self) -> None:
        """Do every job that is not finished; one that fails is noted, and the others go on."""
        self._save()
        try:
            with network(self.config) as lab, scratch_folder() as scratch:
                display = Display(self.jobs, self.results, scratch / "progress.json", self.baseline is None)
                with display.shown():
                    self._do_all(self.jobs, lab, display)
                    if self.baseline is None and (more := self._decide()):
                        display.add(more)
                        self._do_all(more, lab, display)
        except (Stopped, KeyboardInterrupt):
            self.finish(quiet=True)
            raise Stopped(f"stopped; what is finished is kept. To go on: {self._go_on}") from None
        if self.baseline is not None and not self.baseline.run and self.baseline.seconds is not None:
            print_line(baseline.left_out(self.baseline, self._go_on))

    @property
    def _go_on(self) -> str:
        return f"thinwire compare --out {self.folder} --resume"

    def _jobs_of(self, specs: list[str]) -> list[Job]:
        return [Job(s, seed, run_place(self.specs.index(s), s, seed)) for seed in self.seeds for s in specs]

    def _decide(self) -> list[Job]:
        """Whether the baseline is run, now that the others are done; returns its jobs."""
        runs = {e.spec: [r.summary for r in e.finished if r.summary is not None] for e in self.results().entries}
        self.baseline = baseline.decide(runs, len(self.seeds), self.config.minutes)
        more = [baseline.SPEC] if self.baseline and self.baseline.run else []
        self.specs = [*self.specs, *more]
        self._save()
        jobs = self._jobs_of(more)
        self.jobs = [*self.jobs, *jobs]
        return jobs

    def _do_all(self, jobs: list[Job], lab: Lab | None, display: Display) -> None:
        for job in jobs:
            if not RunFolder(self.folder / job.place).summary.exists():
                display.begin(job)
                self._do(job, lab, display.progress_file)
                display.end()

    def _do(self, job: Job, lab: Lab | None, progress_file: Path) -> None:
        run = RunFolder(self.folder / job.place)
        self.errors.pop(job.place, None)
        try:
            config = self.config.run(job.spec, job.seed, run.path, resume=run.config.exists())
            if not config.resume:
                RunFolder.new(config)
            start_ranks(config, lab, progress_file)
            read_summary(run.summary)
        except Stopped:
            raise
        except ThinwireError as error:
            self.errors[job.place] = str(error)
        except Exception as error:
            self.errors[job.place] = f"{type(error).__name__}: {error}"
        self._save()

    def _save(self) -> None:
        about = {
            "format": FORMAT,
            "command": self.command,
            "specs": self.specs,
            "baseline": self.baseline.model_dump() if self.baseline and self.baseline != baseline.NONE else None,
            "seeds": self.seeds,
            "target": self.config.target,
            "settings": self.config.model_dump(mode="json", exclude_none=True, exclude={"resume", "out", "strategy"}),
            "errors": self.errors,
        }
        write_text(self.folder / "compare.json", json.dumps(about, indent=2) + "\n")

    # ---- results

    def results(self) -> Results:
        """What there is so far."""
        return read_results(self.folder)

    def finish(self, quiet: bool = False) -> Results:
        """Write results.json and report.html, and show the table."""
        results = self.results()
        write_text(self.folder / "results.json", json.dumps(as_json(results), indent=2) + "\n")
        if results.example is None and not quiet:
            raise RunError(f"no run finished:\n{_list_errors(results)}")
        if results.example is None:
            return results
        page = write_report(results)
        if not quiet:
            console = Console()
            if not console.is_terminal:
                console = Console(width=WIDE)  # a file has room for every figure
            console.print(comparison_table(results, console.width))
            for line in comparison_lines(results):
                console.print(line, highlight=False, markup=False)
            console.print(f"results in {self.folder}; open {page}", highlight=False, markup=False, soft_wrap=True)
            self._tell_failures(results)
        return results

    def _tell_failures(self, results: Results) -> None:
        """Raise if a run failed that somebody asked for; one of a baseline that was decided on here is only told."""
        failed = [job for job in self.jobs if job.place in self.errors]
        is_unasked = self.config.baseline == "auto" and self.baseline is not None and self.baseline.run
        if any(job.spec != baseline.SPEC or not is_unasked for job in failed):
            raise RunError(f"{len(failed)} of {len(self.jobs)} runs failed:\n{_list_errors(results)}")
        if failed:
            print_line(baseline.failed_unasked(_list_errors(results), self._go_on))


@contextmanager
def alone_on_this_machine() -> Iterator[None]:
    """Wait until no other comparison of this user is running here: two at once would spoil each other's times."""
    path = Path(tempfile.gettempdir(), f"thinwire-compare-{os.getuid()}.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        print_line(f"warning: cannot lock {path} ({error.strerror}): make sure that no other comparison runs here")
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(descriptor, 20, 0).decode().strip() or "?"
            print_line(
                f"waiting for another comparison on this machine (process {who}) to end; "
                "two at once would spoil each other's times"
            )
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _distinct(specs: list[str]) -> list[str]:
    """The specs in their usual spelling; none may be missing or given twice."""
    if not specs:
        raise UsageError("compare what? Give one or more strategies from 'thinwire list strategies', as data_parallel")
    usual = [str(parse(spec)) for spec in specs]
    for spec in usual:
        if usual.count(spec) > 1:
            raise UsageError(f"{spec} is given twice; every strategy runs once for each of --seeds")
    return usual


def _command(specs: list[str], asked: dict[str, Any]) -> str:
    """The command that repeats this comparison."""
    words = ["thinwire", "compare", *specs]
    for name, value in asked.items():
        if name not in ("out", "resume"):
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [f"--no-{option[2:]}"] if value is False else [option, str(value)]
    return shlex.join(words)


def _list_errors(results: Results) -> str:
    return "\n".join(f"  {entry.spec}, {error}" for entry in results.entries for error in entry.errors)
