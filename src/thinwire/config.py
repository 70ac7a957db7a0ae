"""RunConfig and CompareConfig: the settings of a run and of a comparison, checked in one place."""

# long: every setting with the text that --help shows

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from cyclopts import Group, Parameter
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from thinwire.common.durations import checked_duration
from thinwire.errors import UsageError, invalid, unknown

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
WHAT = Group("What to train", sort_key=1)
HOW = Group("How to train it", sort_key=2)
WHERE = Group("Where to run, and what to keep", sort_key=3)
COMPARED = Group("What to compare", sort_key=0)


def option(group: Group, help: str) -> Parameter:
    """The group and the help text of a setting on the command line."""
    return Parameter(group=group, help=help)


class Every(NamedTuple):
    """How often something is done: every so many epochs, or steps."""

    number: int
    unit: Literal["epochs", "steps"]


def parse_every(value: int | str) -> Every:
    """Read a number of epochs, or of steps as "200steps".

    >>> parse_every(2), parse_every("200steps")
    (Every(number=2, unit='epochs'), Every(number=200, unit='steps'))
    """
    found = re.fullmatch(r"(\d+) *(steps?)?", str(value).strip())
    if found is None or (found[2] and int(found[1]) == 0):
        raise ValueError(f"{value} is not possible: give epochs as 2, steps as 200steps, or 0 for the end of training")
    return Every(int(found[1]), "steps" if found[2] else "epochs")


def _checked_every(value: int | str) -> int | str:
    every = parse_every(value)
    return every.number if every.unit == "epochs" else f"{every.number}steps"


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
    data: Annotated[Path | None, option(WHAT, "Folder of the task's data files, if it needs any.")] = None

    epochs: Annotated[PositiveInt | None, option(HOW, "Passes over the data. Default: the task's.")] = None
    steps: Annotated[
        PositiveInt | None,
        option(HOW, "Updates in all, instead of --epochs; the last epoch may be cut short."),
    ] = None
    minutes: Annotated[
        PositiveFloat | None,
        option(HOW, "Stop at the end of the epoch in which training has taken this long. Default: no limit."),
    ] = None
    batch_size: Annotated[
        PositiveInt | None,
        option(
            HOW,
            "Samples per rank and step. With every strategy, an update takes this number times the ranks. "
            "Default: the task's.",
        ),
    ] = None
    lr: Annotated[PositiveFloat | None, option(HOW, "Learning rate. Default: the task's.")] = None
    optimizer: Annotated[
        str | None,
        option(
            HOW, "A name from 'thinwire list optimizers', or your own package.module:function. Default: the task's."
        ),
    ] = None
    schedule: Annotated[
        str | None,
        option(HOW, "How the learning rate changes: a name from 'thinwire list schedules'. Default: the task's."),
    ] = None
    clip_norm: Annotated[
        PositiveFloat | None,
        option(HOW, "Scale gradients down to this norm if theirs is larger. Default: the task's, or none."),
    ] = None
    accumulate: Annotated[
        PositiveInt,
        option(HOW, "Split each batch into this many pieces and add up their gradients: less memory, same update."),
    ] = 1
    autocast: Annotated[bool, option(HOW, "Compute in bfloat16 where that is safe (torch.autocast).")] = False
    compile: Annotated[
        bool,
        option(HOW, "Compile the model (torch.compile); with strategies that leave it whole. Needs a C++ compiler."),
    ] = False
    metric: Annotated[
        str | None,
        option(HOW, "What tests measure: accuracy, loss, or your own package.module:function. Default: the task's."),
    ] = None
    test_every: Annotated[
        int | str,
        AfterValidator(_checked_every),
        option(HOW, "Epochs between tests of the model, or steps, as 200steps; 0 = only when training ends."),
    ] = 1
    log_every: Annotated[
        NonNegativeInt,
        option(HOW, "Steps between rows of loss, learning rate, speed, bytes and waiting in metrics.jsonl; 0 = none."),
    ] = 0
    num_workers: Annotated[
        NonNegativeInt,
        option(HOW, "Worker processes of each rank that read samples; 0 = the rank reads them. Batches are the same."),
    ] = 0
    seed: Annotated[
        NonNegativeInt,
        option(HOW, "Random seed: decides the first weights, the data order and everything else random."),
    ] = 0

    ranks: Annotated[
        PositiveInt | None,
        option(WHERE, "Processes to start here. Default: those that torchrun, srun or mpirun started, else 1."),
    ] = None
    nodes: Annotated[
        PositiveInt | None,
        option(
            WHERE,
            "Hosts to make on this machine, which share the ranks. Default: with --link one for each rank, else none.",
        ),
    ] = None
    link: Annotated[
        str | None,
        option(
            WHERE, "Rate and delay (each way) of the link of each host, as 100mbit or 1gbit,10ms. Default: no limit."
        ),
    ] = None
    strict: Annotated[
        bool, option(WHERE, "Fail if the link cannot be made, or if it is measured to be more than 10 % off.")
    ] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda"], option(WHERE, "Device to compute on; auto = GPUs if there are any.")
    ] = "auto"
    iface: Annotated[
        str, option(WHERE, "Network interface to connect through, as eth0; auto = the one that leads to rank 0.")
    ] = "auto"
    secret_file: Annotated[
        Path | None,
        option(
            WHERE,
            "File with a secret that every rank must know to join; nobody else may be able to open the file. "
            "Default: the variable THINWIRE_SECRET, or none.",
        ),
    ] = None
    elastic: Annotated[
        str | None,
        option(
            WHERE,
            "Be one rank of a run whose ranks may come and go, at HOST:PORT, an address of one of the machines. With "
            "local_sgd and diloco.",
        ),
    ] = None
    min_ranks: Annotated[PositiveInt, option(WHERE, "With --elastic: the run begins once so many ranks are here.")] = 1
    out: Annotated[Path | None, option(WHERE, "Folder for the results. Default: a new one in runs/.")] = None
    track: Annotated[
        Literal["tensorboard", "wandb", "mlflow", "trackio"] | None,
        option(
            WHERE, "Also write the rows of metrics for this tracker, in --out and without network. Each is an extra."
        ),
    ] = None
    resume: Annotated[
        bool | Literal["auto"],
        option(
            WHERE,
            "Continue the run in --out from its last checkpoint. If there is no run yet, start one, provided that "
            "settings such as --task are given; with --resume=auto, start one in any case.",
        ),
    ] = False
    checkpoint_every: Annotated[
        NonNegativeInt, option(WHERE, "Steps between checkpoints; 0 = only at the end of each epoch.")
    ] = 0
    keep: Annotated[
        int,
        Field(ge=2),
        option(WHERE, "Checkpoints to keep; at least two, so that one is left if the newest is damaged."),
    ] = 2
    patience: Annotated[
        str | None,
        AfterValidator(lambda given: given and checked_duration(given)),
        option(
            WHERE,
            "How long ranks wait for a late one before the run ends, as 90s, 5m or 2h. Default: 30 minutes, longer on "
            "slow links with large models; 5 minutes until all ranks have started.",
        ),
    ] = None
    restarts: Annotated[
        NonNegativeInt, option(WHERE, "How often to restart from the last checkpoint when a rank dies.")
    ] = 0

    @field_validator("steps")
    @classmethod
    def _refuse_both_lengths(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("epochs")
        if steps is not None and epochs is not None:
            raise ValueError(f"{steps} steps and {epochs} epochs are two lengths of one run; give one of them")
        return steps

    @model_validator(mode="after")
    def _refuse_what_is_no_text(self) -> Self:
        """The settings are saved in a file, and so must be text."""
        for name, value in self.__dict__.items():
            if isinstance(value, str | Path) and not str(value).isprintable():
                raise ValueError(f"{name}={str(value)!r} has characters that are no text")
        return self

    def to_toml(self) -> str:
        """The settings that are not None, as TOML."""
        values = self.model_dump(mode="json", exclude_none=True, exclude={"resume"})
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


class CompareConfig(RunConfig):
    """The settings that all runs of a comparison share. `seed` is the seed of the first run of each strategy."""

    strategy: Annotated[str, Parameter(parse=False, show=False)] = ""
    elastic: Annotated[None, Parameter(parse=False, show=False)] = None
    min_ranks: Annotated[Literal[1], Parameter(parse=False, show=False)] = 1
    resume: Annotated[
        bool | Literal["auto"],
        option(
            WHERE,
            "Continue the comparison in --out with the runs that are not finished. If there is none yet, start it.",
        ),
    ] = False
    seeds: Annotated[PositiveInt, option(COMPARED, "Runs of each strategy. Their seeds count up from --seed.")] = 3
    baseline: Annotated[
        Literal["auto", "alone", "none"],
        option(
            COMPARED,
            "Also train on one machine alone: alone = always, none = never, auto = if that adds at most a quarter to "
            "the time of the other runs.",
        ),
    ] = "auto"
    target: Annotated[
        FiniteFloat | None,
        option(COMPARED, "Also report the training time until the metric reached this value, as 95."),
    ] = None

    def run(self, strategy: str, seed: int, out: Path, resume: bool) -> RunConfig:
        """The settings of one run."""
        common = self.model_dump(include=set(RunConfig.model_fields))
        return RunConfig(**{**common, "strategy": strategy, "seed": seed, "out": out, "resume": resume})


class PlanConfig(BaseModel):
    """The settings of a plan: what is trained, on how many ranks, and on which network."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    task: Annotated[str, option(WHAT, "A name from 'thinwire list tasks', or your own package.module:function.")] = (
        "digits"
    )
    model: Annotated[str | None, option(WHAT, "A name from 'thinwire list models'. Default: the task's.")] = None
    data: Annotated[Path | None, option(WHAT, "Folder of the task's data files, if it needs any.")] = None
    epochs: Annotated[PositiveInt | None, option(HOW, "Passes over the data. Default: the task's.")] = None
    batch_size: Annotated[PositiveInt | None, option(HOW, "Samples per rank and step. Default: the task's.")] = None
    optimizer: Annotated[str | None, option(HOW, "A name from 'thinwire list optimizers'. Default: the task's.")] = None
    accumulate: Annotated[PositiveInt, option(HOW, "Pieces that each batch is computed in.")] = 1
    autocast: Annotated[bool, option(HOW, "Compute in bfloat16 where that is safe (torch.autocast).")] = False
    ranks: Annotated[PositiveInt, option(WHERE, "Processes that train, 2 or more.")] = 4
    nodes: Annotated[PositiveInt | None, option(WHERE, "Machines that share them. Default: one for each rank.")] = None
    link: Annotated[
        list[str],
        option(WHERE, "Rate and delay (each way) of each node's link, as 100mbit or 1gbit,10ms. May be given again."),
    ] = ["100mbit"]
    here: Annotated[
        bool,
        option(WHERE, "Nodes are hosts on this machine, as train --link makes them, and share its cores."),
    ] = False
    compute: Annotated[
        str | None,
        option(WHERE, "Computing rate of a rank, as 20tflops, if that is not this machine's. Default: measured."),
    ] = None
    own_runs: Annotated[
        Path | None,
        Parameter(name="--from", group=WHERE, help="Folder of your own finished runs, for what they say of accuracy."),
    ] = None
    out: Annotated[
        Path | None, option(WHERE, "Folder for plan.html, with curves, and plan.json. Default: no page.")
    ] = None


# Settings that may change when a run is resumed. All others decide its numbers.
MAY_CHANGE = {
    "epochs", "steps", "minutes", "test_every", "log_every", "num_workers", "strict", "data", "out", "track", "resume",
    "checkpoint_every", "keep", "restarts", "device", "iface", "patience", "secret_file", "elastic", "min_ranks",
}  # fmt: skip
LENGTHS = ("epochs", "steps")  # of which a run has one


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Their names are checked, their values are not."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from None
    except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
        raise UsageError(f'{path} is not TOML: {error}; expected lines such as  task = "digits"') from None
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for key in values:
        if key not in RunConfig.model_fields:
            raise unknown(f"setting in {path}", key, RunConfig.model_fields)
    return values


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Several layers of settings as one; later layers override earlier ones.

    >>> merge({"epochs": 3, "lr": 0.1}, {"steps": 200})
    {'lr': 0.1, 'steps': 200}
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if any(layer.get(name) is not None for name in LENGTHS):
            merged = {name: value for name, value in merged.items() if name not in LENGTHS}
        merged |= layer
    return merged


def make_config(*layers: dict[str, Any], source: str = "settings") -> RunConfig:
    """One config from several layers of settings; later layers override earlier ones."""
    try:
        return RunConfig(**merge(*layers))
    except ValidationError as error:
        raise invalid(error, source) from None
    except UnicodeEncodeError as error:
        raise UsageError(f"{source}: {error.object!r} is not possible: it has characters that are no text") from None


def resumed(saved: RunConfig, asked: dict[str, Any], folder: Path) -> RunConfig:
    """The config to resume with: the saved one, with those of the settings asked for now that may change."""
    for key, value in asked.items():
        before = getattr(saved, key)
        if key not in MAY_CHANGE and value != before:
            name = key.replace("_", "-")
            raise UsageError(
                f"the run in {folder} has {name}={before}, not {value}; leave out --{name} to resume it, "
                "or start a new run with another --out"
            )
    return make_config(saved.model_dump(), asked)
