"""A comparison: what is to be run, and its folder. Its file compare.json holds all that --resume needs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from thinwire.comm.addresses import AUTO
from thinwire.common.files import write_text
from thinwire.common.messages import say
from thinwire.compare import baseline
from thinwire.compare.baseline import Decision
from thinwire.compare.files import FORMAT, holds_comparison, read_comparison_file, run_place
from thinwire.compare.results import Results, read_results
from thinwire.config import CompareConfig
from thinwire.errors import UsageError, invalid
from thinwire.launch.settings import check_names, check_options
from thinwire.run.network import check_network
from thinwire.run.records import RunFolder, is_free
from thinwire.spec import parse

CHANGEABLE = {
    "out",
    "resume",
    "target",
    "baseline",
    "data",
    "strict",
    "keep",
    "restarts",
    "iface",
    "secret_file",
}  # options, with --resume


class Job(NamedTuple):
    """One run that a comparison has to do: a strategy with a seed. `place` is its folder in the comparison's folder."""

    spec: str
    seed: int
    place: str


class WorldShape(BaseModel):
    """The world that does the runs of a comparison: who made it, and how many ranks each node has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    launcher: str
    ranks_by_node: list[int]

    def __str__(self) -> str:
        """In words, as "4 ranks on 2 nodes"."""
        ranks, nodes = sum(self.ranks_by_node), len(self.ranks_by_node)
        return f"{ranks} ranks on {nodes} node{'s' * (nodes > 1)}"

    @property
    def command(self) -> str:
        """How to start thinwire in such a world; torchrun and mpirun may need addresses too."""
        ranks, nodes = sum(self.ranks_by_node), len(self.ranks_by_node)
        if self.launcher == "torchrun":
            per_node = self.ranks_by_node[0] if len(set(self.ranks_by_node)) == 1 else "…"
            return f"torchrun {f'--nnodes {nodes} ' * (nodes > 1)}--nproc-per-node {per_node} -m thinwire"
        return f"srun -N {nodes} -n {ranks} thinwire" if self.launcher == "srun" else f"mpirun -n {ranks} thinwire"


class Comparison:
    """The strategies and seeds to run, and their folder: compare.json, results.json, report.html, a folder per run.

    `baseline` says whether one machine alone is run too; None means that this is decided after the other runs. `world`
    is the one that does the runs; None if ranks are started here.
    """

    def __init__(
        self, specs: list[str], config: CompareConfig, folder: Path, command: str, decided: Decision | None = None,
        world: WorldShape | None = None,
    ) -> None:  # fmt: skip
        if world is None:
            check_network(config)
        self.world = world
        self.baseline = baseline.initial_decision(config, specs, decided, world.ranks_by_node if world else None)
        self.specs = [*specs, baseline.SPEC] if self.baseline and self.baseline.run else specs
        self.config = config
        self.folder = folder
        self.command = command
        self.errors: dict[str, str] = {}  # by Job.place
        self.seeds = list(range(config.seed, config.seed + config.seeds))
        self.jobs = self._jobs_of(self.specs)
        for check in (check_names, check_options):  # all names first: that needs no torch
            for spec in self.specs:
                check(config.run(spec, 0, folder, resume=False))

    def _jobs_of(self, specs: list[str]) -> list[Job]:
        return [Job(s, seed, run_place(self.specs.index(s), s, seed)) for seed in self.seeds for s in specs]

    def is_finished(self, job: Job) -> bool:
        """Whether a job needs not be done again."""
        return RunFolder(self.folder / job.place).summary.exists()

    def decide_baseline(self) -> list[Job]:
        """Decide, after the other runs, whether the baseline is run; return its jobs."""
        runs = {e.spec: [r.summary for r in e.finished if r.summary is not None] for e in self.results().entries}
        self.baseline = baseline.decide(runs, len(self.seeds), self.config.minutes)
        more = [baseline.SPEC] if self.baseline and self.baseline.run else []
        self.specs = [*self.specs, *more]
        self.save()
        jobs = self._jobs_of(more)
        self.jobs = [*self.jobs, *jobs]
        return jobs

    def save(self) -> None:
        """Write compare.json."""
        about = {
            "format": FORMAT,
            "command": self.command,
            "specs": self.specs,
            "baseline": self.baseline.model_dump() if self.baseline and self.baseline != baseline.NOT_RUN else None,
            "world": self.world.model_dump() if self.world else None,
            "seeds": self.seeds,
            "target": self.config.target,
            "settings": self.config.model_dump(mode="json", exclude_none=True, exclude={"resume", "out", "strategy"}),
            "errors": self.errors,
        }
        write_text(self.folder / "compare.json", json.dumps(about, indent=2) + "\n")

    def results(self) -> Results:
        """The results so far, read from the folder."""
        return read_results(self.folder)

    @property
    def resume_command(self) -> str:
        given = {
            "--iface": self.config.iface if self.config.iface != AUTO else None,
            "--secret-file": self.config.secret_file,
        }
        again = "".join(f" {name} {value}" for name, value in given.items() if value and self.world)
        return _resume_command(self.folder, self.world) + again


def open_comparison(specs: list[str], options: dict[str, Any], world: WorldShape | None = None) -> Comparison:
    """The comparison that these command-line options ask for: a new one, or with --resume the one in --out.

    If --resume finds an empty folder, a new comparison begins there. `world` is the one that will do its runs.
    """
    if not options.get("resume"):
        return new_comparison(specs, options, world)
    if options.get("out") is not None and specs and is_free(Path(options["out"])):
        say(f"no comparison in {options['out']} yet: starting one", once=True)
        return new_comparison(specs, {**options, "resume": False}, world)
    return resumed_comparison(specs, options, world)


def new_comparison(specs: list[str], options: dict[str, Any], world: WorldShape | None) -> Comparison:
    """A comparison that begins; a folder that is not empty is refused."""
    config = CompareConfig(**options)
    folder = config.out or next(p for i in range(1, 10**6) if not (p := Path(f"runs/compare-{i}")).exists())
    if folder.is_dir() and any(folder.iterdir()):
        resume = "add --resume to go on with it, or " if holds_comparison(folder) else ""
        what = "a comparison" if resume else "other things"
        raise UsageError(f"{folder} holds {what} already; {resume}give another --out")
    RunFolder.new(config.run("", 0, folder, resume=False))
    return Comparison(_normalize_specs(specs), config, folder, _command(specs, options, world), world=world)


def resumed_comparison(specs: list[str], options: dict[str, Any], world: WorldShape | None) -> Comparison:
    """The comparison in --out, to go on with; options that would change its runs are refused."""
    if options.get("out") is None:
        raise UsageError("--resume needs --out, the folder of the comparison to go on with")
    folder = Path(options["out"])
    if not holds_comparison(folder):
        new = "give the strategies of a new one too" if is_free(folder) else "give another for a new one"
        raise UsageError(f"{folder} holds no comparison (no compare.json); check --out, or {new}")
    about = read_comparison_file(folder)
    try:
        decided = Decision.model_validate(about["baseline"]) if about.get("baseline") else None
        saved = CompareConfig(**{"baseline": "none", **about.get("settings", {})})  # older files have no baseline
        begun_in = WorldShape.model_validate(about["world"]) if about.get("world") else None
    except ValidationError as error:
        raise invalid(error, str(folder / "compare.json")) from None
    _check_world(folder, begun_in, world)
    saved_specs = about["specs"][:-1] if decided and decided.run else about["specs"]
    if specs and _normalize_specs(specs) != saved_specs:
        raise UsageError(f"{folder} compares {', '.join(saved_specs)}; leave the strategies out to resume it")
    for name, value in options.items():
        if name not in CHANGEABLE and value != getattr(saved, name):
            option = name.replace("_", "-")
            raise UsageError(f"{folder} was begun with --{option} {getattr(saved, name)}; leave out --{option}")
    config = saved.model_copy(update={name: value for name, value in options.items() if name in CHANGEABLE})
    comparison = Comparison(saved_specs, config, folder, about["command"], decided, world)
    comparison.errors = about["errors"]
    return comparison


def _check_world(folder: Path, begun_in: WorldShape | None, world: WorldShape | None) -> None:
    """Raise UsageError if a comparison was begun in another kind of world: its figures could not be compared."""
    if begun_in is None and world is None:
        return
    resume = _resume_command(folder, begun_in)
    if begun_in is None and world is not None:
        raise UsageError(
            f"{folder} was begun with ranks that thinwire starts itself, not {world.launcher}; go on with it: {resume}"
        )
    if world is None or begun_in is None or world.ranks_by_node != begun_in.ranks_by_node:
        here = f"{world.launcher} started {world}" if world else "there is no such world here"
        raise UsageError(f"{folder} was begun by {begun_in}, and {here}; start as many, as {resume}")


def _resume_command(folder: Path, world: WorldShape | None) -> str:
    return f"{world.command if world else 'thinwire'} compare --out {folder} --resume"


def _normalize_specs(specs: list[str]) -> list[str]:
    """The specs in their canonical spelling; there must be one, and none may be given twice."""
    if not specs:
        raise UsageError("compare what? Give one or more strategies from 'thinwire list strategies', as data_parallel")
    normalized = [str(parse(spec)) for spec in specs]
    for spec in normalized:
        if normalized.count(spec) > 1:
            raise UsageError(f"{spec} is given twice; every strategy runs once for each of --seeds")
    return normalized


def _command(specs: list[str], options: dict[str, Any], world: WorldShape | None) -> str:
    """The command line that repeats this comparison."""
    words = ["compare", *specs]
    for name, value in options.items():
        if name not in ("out", "resume"):
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [f"--no-{option[2:]}"] if value is False else [option, str(value)]
    return f"{world.command if world else 'thinwire'} {shlex.join(words)}"
