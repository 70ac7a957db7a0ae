"""The settings of a run: read, merged with those of the run that is resumed, and checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire import registry
from thinwire.comm.world import find_world
from thinwire.common.messages import print_line
from thinwire.config import MAY_CHANGE, RunConfig, make_config, merge, read_toml, resumed
from thinwire.errors import UsageError
from thinwire.run.records import RunFolder, is_free
from thinwire.run.tracking.base import check_tracker
from thinwire.spec import parse
from thinwire.tasks.naming import check_task_name


def resolve(file: Path | None, asked: dict[str, Any]) -> RunConfig:
    """The config of a run, from a TOML file, the options `asked` for and, with --resume, the saved config.

    If there is no run to resume but settings are given, --resume starts one: a job that is queued again can use the
    same command. --resume=auto starts one without settings too, and in a folder that holds other files.
    """
    kind = registry.kind_of(str(file).partition("(")[0])
    if file is not None and kind is not None and not file.exists():
        what = registry.SINGULAR[kind]
        raise UsageError(f"{file} is a {what}, not a TOML file of settings; give names by their options, as --{what}")
    given = merge(read_toml(file) if file else {}, asked)
    config = make_config(given, source=str(file or "settings"))
    if config.resume and config.out is not None and _may_begin(config, config.out, given):
        world = find_world()
        if world is None or world.rank == 0:
            print_line(f"no run in {config.out} yet: starting one")
        return config.model_copy(update={"resume": False})
    if config.resume:
        saved = RunFolder.existing(config.out)
        return resumed(saved.load_config(), {**given, "resume": True}, saved.path)
    return config


def _may_begin(config: RunConfig, out: Path, given: dict[str, Any]) -> bool:
    """Whether --resume is to start a run, because there is none."""
    if config.resume == "auto":
        return not RunFolder(out).config.exists()
    return is_free(out) and not given.keys() <= MAY_CHANGE


def check_names(config: RunConfig) -> None:
    """Raise UsageError for a name that does not exist. It does not import torch, so it takes no time."""
    check_task_name(config.task)
    for kind, spec in _specs(config):
        registry.find(kind, parse(spec).name)
    for kind, name in (("optimizer", config.optimizer), ("metric", config.metric)):
        if name is not None and registry.is_own(name):
            registry.check_own_name(kind, name)


def check_options(config: RunConfig) -> None:
    """Raise UsageError for an option that does not exist, before ranks are started."""
    from thinwire.optim import build_optimizer
    from thinwire.strategies.prepare import refuse_compiling
    from thinwire.tasks.loading import check_task
    from thinwire.tasks.metrics import load_metric

    check_task(config.task)
    if config.optimizer is not None:
        build_optimizer(config.optimizer, config.lr or 1.0)
    if config.metric is not None:
        load_metric(config.metric)
    for kind, spec in _specs(config):
        registry.check(kind, spec)
    if config.track is not None:
        check_tracker(config.track)
    if config.compile:
        refuse_compiling(config.strategy)


def _specs(config: RunConfig) -> list[tuple[str, str]]:
    """The kind and the spec of each registered thing that a config names."""
    specs = {
        "strategies": config.strategy,
        "tasks": None if ":" in config.task else config.task,
        "models": config.model,
        "optimizers": None if registry.is_own(config.optimizer or "") else config.optimizer,
        "schedules": config.schedule,
    }
    return [(kind, spec) for kind, spec in specs.items() if spec is not None]
