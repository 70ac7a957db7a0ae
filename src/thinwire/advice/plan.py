"""thinwire plan: which strategy, on the network you have and on the one you do not have yet."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from thinwire import registry
from thinwire.advice.candidates import candidates
from thinwire.comm.world import place
from thinwire.common.messages import print_line
from thinwire.config import PlanConfig, RunConfig
from thinwire.errors import ThinwireError, UsageError
from thinwire.netlab.link import Link, parse_link
from thinwire.spec import parse

SLOWEST_MBIT, FASTEST_MBIT = 0.01, 1_000_000.0
LEAST_LEFT = 5.0  # seconds: strategies differ too much in what they take for a shorter estimate to be right
PLAN_FILES = ("plan.json", "plan.html")
PAGE_MARK = '<meta name="generator" content="thinwire plan">'  # at the head of plan.html
RATES = {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15}


class Option(NamedTuple):
    """A strategy of a plan on one link: its forecast, what was measured of its accuracy, and why to take it or not."""

    link: Link
    forecast: Any  # thinwire.plan.planner.Forecast, which imports torch
    measured: list[Any]  # thinwire.plan.measured.Quality
    why: str

    def as_json(self, config: PlanConfig) -> dict[str, Any]:
        """A flat object, for JSON."""
        place = {"link": str(self.link), "ranks": config.ranks, "nodes": config.nodes or config.ranks}
        return {
            **self.forecast._asdict(),
            **place,
            "measured": [str(quality) for quality in self.measured],
            "why": self.why,
        }


@dataclass
class Plan:
    """A plan: for each link the options, the fastest first; and what was left out, with the reason."""

    config: PlanConfig
    about: dict[str, Any]  # what was measured of the model and of this machine
    links: list[Link]
    options: list[list[Option]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    studies: list[Any] = field(default_factory=list)
    workload: Any = None  # thinwire.plan.workload.TaskWorkload
    machine: Any = None  # thinwire.plan.machine.Machine

    def as_json(self) -> list[dict[str, Any]]:
        """All options as flat objects, link by link, the fastest first."""
        return [option.as_json(self.config) for options in self.options for option in options]


def plan(strategies: Sequence[str], config: PlanConfig, as_json: bool) -> None:
    """Make a plan, and print it as a table or as JSON; with --out, also write a page and its data."""
    from thinwire.advice.plan_table import print_plan
    from thinwire.run.tables import output_console

    if config.out is not None:
        check_folder(config.out)
    made = make_plan(strategies, config, say=print_line)
    if as_json:
        print(json.dumps(made.as_json(), indent=2))
    else:
        print_plan(made, output_console())
    if config.out is not None:
        from thinwire.advice.plan_page import write_page

        print_line(f"page: {write_page(made, config.out, say=print_line)}")


def check_folder(folder: Path) -> None:
    """UsageError if a folder holds anything but an earlier plan."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; give a folder")
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if path.name not in PLAN_FILES or not _is_ours(path):
            raise UsageError(f"{folder} holds other things already ({path.name}); give another --out")


def _is_ours(path: Path) -> bool:
    """Whether a plan wrote this file."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            return PAGE_MARK in text[:1000]
        return isinstance(found := json.loads(text), dict) and {"options", "curves"} <= found.keys()
    except (OSError, ValueError):
        return False


def make_plan(strategies: Sequence[str], config: PlanConfig, say: Callable[[str], None] = lambda text: None) -> Plan:
    """Study the strategies on this machine, and forecast each on every link."""
    links = [parse_link(text, SLOWEST_MBIT, FASTEST_MBIT) for text in config.link]
    nodes = check_world(config)
    for spec in strategies:
        registry.find("strategies", parse(spec).name)
        if parse(spec).name == "auto":
            raise UsageError("auto chooses when a run begins; name strategies, or none for all that can run")
    from thinwire.advice.ranking import ranked, wire_for
    from thinwire.plan.machine import measure_machine
    from thinwire.plan.measured import read_own
    from thinwire.plan.planner import study

    own = read_own(config.own_runs) if config.own_runs is not None else {}
    for spec in strategies:
        registry.check("strategies", spec)
    workload = load_workload(config)
    specs = list(dict.fromkeys(str(parse(spec)) for spec in strategies)) or candidates(workload.epochs)
    machine = measure_machine(len(nodes) if config.here else max(map(nodes.count, nodes)))
    made = Plan(config, _about(workload, machine), links, workload=workload, machine=machine)
    begin = time.monotonic()
    for number, spec in enumerate(specs):
        say(f"{number + 1} of {len(specs)}: {spec}" + time_left(time.monotonic() - begin, number, len(specs)))
        try:
            made.studies.append(study(spec, workload, nodes))
        except (ThinwireError, RuntimeError) as error:
            text = str(error).partition("\n")[0]
            made.left_out[spec] = text if text.startswith(parse(spec).name) else f"{spec}: {text}"
    if not made.studies:
        raise UsageError(f"none of these strategies can run: {'; '.join(made.left_out.values())}")
    optimizer = workload.config.optimizer or ""
    updates = workload.epochs * workload.steps_per_epoch(len(nodes))
    made.options = [
        ranked(made.studies, link, wire_for(link, config, machine), optimizer, own, updates) for link in links
    ]
    return made


def time_left(seconds: float, done: int, total: int) -> str:
    """How long the other strategies need if each takes what one has taken on average; "" if it is not worth a word.

    >>> time_left(6.0, 3, 10), time_left(6.0, 8, 10), time_left(0.0, 0, 10)
    (' (about 14 s left)', '', '')
    """
    left = seconds / done * (total - done) if done else 0.0
    return f" (about {left:.0f} s left)" if left >= LEAST_LEFT else ""


def check_world(config: PlanConfig) -> list[int]:
    """The node of each rank; UsageError if there is nothing to plan."""
    if config.ranks == 1:
        raise UsageError("--ranks 1: one rank sends nothing; try --ranks 4")
    return place(config.ranks, config.nodes or config.ranks)


def load_workload(config: PlanConfig) -> Any:
    """The task's workload, with the task's defaults for what is not given."""
    from torch.utils.data import IterableDataset

    from thinwire.plan.workload import TaskWorkload
    from thinwire.run.setup import find_length
    from thinwire.run.startup import with_defaults
    from thinwire.tasks.loading import load_task

    shared = config.model_dump(include={"task", "model", "data", "epochs", "batch_size", "optimizer", "accumulate"})
    task = load_task(config.task, config.data, 0)
    settings = with_defaults(RunConfig(**shared, autocast=config.autocast, ranks=config.ranks), task, config.ranks)
    if isinstance(task.train, IterableDataset):
        raise UsageError(f"the training data of {config.task} is a stream; a plan needs a dataset with an index")
    if settings.steps is not None:
        length = find_length(settings, task, config.ranks)
        settings = settings.model_copy(update={"epochs": length.num_epochs, "steps": None})
    return TaskWorkload(settings, task, parse_compute(config.compute) if config.compute else None)


def parse_compute(text: str) -> float:
    """A computing rate in operations per second.

    >>> parse_compute("20tflops")
    20000000000000.0
    """
    match = re.fullmatch(r"([\d.]+) ?([gtp]flops)(?:/s)?", text.strip().lower())
    try:
        if match is None or float(match[1]) <= 0:
            raise ValueError
        return float(match[1]) * RATES[match[2]]
    except ValueError:
        raise UsageError(f"--compute {text}: expected a rate above 0, as 500gflops or 20tflops") from None


def _about(workload: Any, machine: Any) -> dict[str, Any]:
    from thinwire.plan.workload import machine_flops

    return {
        "parameters": sum(p.numel() for p in workload.meta_model.parameters()),
        "flops_per_step": workload.step_cost[0],
        "is_timed": workload.is_timed,
        "flops_per_second": workload.flops_per_second or machine_flops(),
        "cores": machine.cores,
        "slowdown": machine.slowdown[-1],
    }
