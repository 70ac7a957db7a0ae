"""RunConfig: everything that decides a run, checked in one place."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from thinwire.errors import UsageError, invalid, unknown

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
WHAT = Group("What to train", sort_key=1)
HOW = Group("How", sort_key=2)
WHERE = Group("Where, and what to keep", sort_key=3)
COMPARED = Group("What to compare", sort_key=0)


def option(group: Group, help: str) -> Parameter:
    """How a setting is shown on the command line."""
    return Parameter(group=group, help=help)


class RunConfig(BaseModel):
    """The settings of one run. Fields that are None are filled in from the task's own defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    task: Annotated[
        str,
        option(WHAT, "Data, loss and metric: a name from 'thinwire list tasks', or your own package.module:function."),
    ] = "digits"
    strategy: Annotated[
        str,
        option(WHAT, "How ranks work together: a name from 'thinwire list strategies', with its options in brackets."),
    ] = "data_parallel"
    model: Annotated[str | None, option(WHAT, "A name from 'thinwire list models'. Default: the task's.")] = None
    data: Annotated[Path | None, option(WHAT, "Folder of the task's data files, where it needs any.")] = None

    epochs: Annotated[PositiveInt | None, option(HOW, "Passes over the data. Default: the task's.")] = None
    minutes: Annotated[
        PositiveFloat | None,
        option(HOW, "Stop with the epoch in which training has taken this long. Default: never."),
    ] = None
    batch_size: Annotated[
        PositiveInt | None,
        option(
            HOW,
            "Samples per rank and step: every strategy takes this times the number of ranks in each update. "
            "Default: the task's.",
        ),
    ] = None
    lr: Annotated[PositiveFloat | None, option(HOW, "Learning rate. Default: the task's.")] = None
    optimizer: Annotated[str | None, option(HOW, "A name from 'thinwire list optimizers'. Default: the task's.")] = None
    schedule: Annotated[
        str | None, option(HOW, "Learning rate over time, from 'thinwire list schedules'. Default: the task's.")
    ] = None
    clip_norm: Annotated[PositiveFloat | None, option(HOW, "Scale gradients down to this norm.")] = None
    accumulate: Annotated[
        PositiveInt, option(HOW, "Compute each batch in this many pieces: less memory, same update.")
    ] = 1
    autocast: Annotated[bool, option(HOW, "Compute in bfloat16 where that is safe.")] = False
    seed: Annotated[NonNegativeInt, option(HOW, "Of weights, data order and everything else random.")] = 0

    ranks: Annotated[
        PositiveInt | None,
        option(
            WHERE,
            "Processes to start on this machine. Default: join the world that torchrun, srun or mpirun made, else 1.",
        ),
    ] = None
    nodes: Annotated[
        PositiveInt | None,
        option(
            WHERE, "Hosts to spread the ranks over, each with its own network. Default: with --link, one for each rank."
        ),
    ] = None
    link: Annotated[
        str | None,
        option(WHERE, "Give each host a real link, as 100mbit or 1gbit,10ms (each way). Default: none, no limit."),
    ] = None
    strict: Annotated[bool, option(WHERE, "Fail if the link cannot be had, or is measured more than 10 % off.")] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda"], option(WHERE, "Where to compute; auto takes GPUs when there are some.")
    ] = "auto"
    out: Annotated[Path | None, option(WHERE, "Folder for the results. Default: a new one in runs/.")] = None
    resume: Annotated[
        bool,
        option(
            WHERE,
            "Go on with the run in --out, exactly where its last checkpoint left it. Where there is none, start one if "
            "its settings are given, as --task.",
        ),
    ] = False
    checkpoint_every: Annotated[
        NonNegativeInt, option(WHERE, "Steps between checkpoints; 0 = at the end of each epoch only.")
    ] = 0
    keep: Annotated[
        int, Field(ge=2), option(WHERE, "Checkpoints to keep; two, so that one is left if the newest is damaged.")
    ] = 2
    restarts: Annotated[
        NonNegativeInt, option(WHERE, "Times to start again from the last checkpoint when a rank dies.")
    ] = 0

    def to_toml(self) -> str:
        """The settings that are set, as TOML."""
        values = self.model_dump(mode="json", exclude_none=True, exclude={"resume"})
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


class CompareConfig(RunConfig):
    """What the runs of a comparison have in common; `seed` is the first of its seeds."""

    strategy: Annotated[str, Parameter(parse=False, show=False)] = ""
    ranks: Annotated[PositiveInt | None, option(WHERE, "Processes to start on this machine. Default: 1.")] = None
    resume: Annotated[
        bool,
        option(WHERE, "Go on with the comparison in --out, or start it: what is finished stays, the rest is done."),
    ] = False
    seeds: Annotated[PositiveInt, option(COMPARED, "Runs of each strategy, with seeds that count up from --seed.")] = 3
    baseline: Annotated[
        Literal["auto", "alone", "none"],
        option(
            COMPARED,
            "Also train on one machine alone, to compare with: alone or none; auto: only if that adds at most a "
            "quarter to the time of the other runs.",
        ),
    ] = "auto"
    target: Annotated[
        FiniteFloat | None, option(COMPARED, "Also tell the training time until the metric was this good, as 95.")
    ] = None

    def run(self, strategy: str, seed: int, out: Path, resume: bool) -> RunConfig:
        """The settings of one run."""
        common = self.model_dump(include=set(RunConfig.model_fields))
        return RunConfig(**{**common, "strategy": strategy, "seed": seed, "out": out, "resume": resume})


# What may change when a run is resumed: everything else decides the numbers that come out.
MAY_CHANGE = {"epochs", "minutes", "strict", "data", "out", "resume", "checkpoint_every", "keep", "restarts", "device"}


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file, names checked."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f'{path} is not TOML: {error}; expected lines like  task = "digits"') from None
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for key in values:
        if key not in RunConfig.model_fields:
            raise unknown(f"setting in {path}", key, RunConfig.model_fields)
    return values


def make_config(*layers: dict[str, Any], source: str = "settings") -> RunConfig:
    """One config from several layers of settings, later ones first."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= layer
    try:
        return RunConfig(**merged)
    except ValidationError as error:
        raise invalid(error, source) from None


def resumed(saved: RunConfig, asked: dict[str, Any], folder: Path) -> RunConfig:
    """The config to resume with: the saved one, with what was asked for now where that may change."""
    for key, value in asked.items():
        before = getattr(saved, key)
        if key not in MAY_CHANGE and value != before:
            name = key.replace("_", "-")
            raise UsageError(
                f"the run in {folder} has {name}={before}, not {value}; leave out --{name} to resume it, "
                "or start a new run with another --out"
            )
    return make_config(saved.model_dump(), asked)
