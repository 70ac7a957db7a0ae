"""`thinwire train --elastic`: one rank of an elastic run of a task."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thinwire import registry
from thinwire.comm.ledger import Ledger
from thinwire.comm.world import find_world
from thinwire.common.formats import format_bytes, format_metric
from thinwire.common.messages import print_line
from thinwire.common.tensor_files import save_model
from thinwire.config import RunConfig
from thinwire.elastic.job import Job, refuse_others
from thinwire.elastic.keeper import find_place
from thinwire.elastic.member import Member
from thinwire.elastic.record import Record, Row
from thinwire.elastic.train import PATIENCE, take_part
from thinwire.elastic.trainee import Trainee, solo
from thinwire.errors import UsageError
from thinwire.optim import build_optimizer
from thinwire.run.evaluation import evaluate
from thinwire.run.records import RunFolder
from thinwire.run.startup import hold_folder, seed_everything, use_device, with_defaults
from thinwire.surgery.memory_format import usual_copy
from thinwire.tasks.base import Task
from thinwire.tasks.loading import load_task, with_metric
from thinwire.tasks.metrics import as_metric

FIXED = ("ranks", "nodes", "link", "steps", "minutes", "compile", "track", "restarts", "log_every", "checkpoint_every")


def train_as_member(config: RunConfig) -> None:
    """Be one rank of an elastic run until it is finished."""
    _refuse_unfit(config)
    task, config = load(config)
    find_place(str(config.elastic))
    device = use_device(config, None)
    trainee = Trainee(job_of(config, task, device))
    folder = hold_folder(config)
    try:
        _train(config, task, trainee, folder)
    finally:
        folder.release()


def _train(config: RunConfig, task: Task, trainee: Trainee, folder: RunFolder) -> None:
    """Train in a folder that is held."""
    device, test_every = trainee.job.device, int(config.test_every)
    if not config.resume:
        config = config.model_copy(update={"out": folder.path})
        folder.save_config(config)

    def after_round(row: Row, member: Member) -> None:
        """The first rank tests at the end of an epoch; the others wait for it at the next meeting."""
        is_due = member.at.epoch > row.epoch and test_every and (row.epoch + 1) % test_every == 0
        if is_due and row.members[0] == member.id:
            tested, number = _test(member.trainee.model, task, config, device), len(row.members)
            folder.append(folder.metrics, [{"epoch": row.epoch + 1, "round": row.round, "ranks": number, **tested}])
            print_line(f"epoch {row.epoch + 1}: {_shown(tested)} ({number} rank{'s' * (number != 1)})")

    try:
        taken = take_part(
            trainee, str(config.elastic), folder, bool(config.resume), config.min_ranks,
            config.patience or PATIENCE, config.iface, config.secret_file, config.keep, after_round,
            "prints epochs" if test_every else "",
        )  # fmt: skip
    except BaseException:
        folder.remove_if_empty()
        raise
    tested = _test(taken.model, task, config, device)
    save_model(taken.model, folder.path / "model.safetensors")
    folder.save_summary(summary(taken.record, taken.ledger, tested))
    rounds, lost = len(taken.record.rows), sum(row.lost_samples for row in taken.record.rows)
    sent = format_bytes(sum(row["wire_bytes"] for row in taken.ledger.rows()))
    print(
        f"{_shown(tested)} after {rounds} rounds; {lost} samples lost with their ranks; sent {sent} by this rank; "
        f"{folder.path}"
    )


def _refuse_unfit(config: RunConfig) -> None:
    """Raise UsageError for settings that an elastic run cannot have."""
    refuse_others(config.strategy)
    plain = RunConfig()
    given = [name for name in FIXED if getattr(config, name) != getattr(plain, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"--elastic does not go with {names}: each command is one rank, and the length of the run is --epochs; "
            "leave these out"
        )
    if find_world() is not None:
        raise UsageError("--elastic ranks find each other; start each by itself, without torchrun, srun or mpirun")
    if not str(config.test_every).isdigit():
        raise UsageError(f"--test-every {config.test_every}: with --elastic a step has no fixed size; give epochs")


def load(config: RunConfig) -> tuple[Task, RunConfig]:
    """The task of a run, and the config with its defaults."""
    seed_everything(config.seed)
    task = with_metric(load_task(config.task, config.data, config.seed), config.metric)
    return task, with_defaults(config, task, 1).model_copy(update={"ranks": None})


def job_of(config: RunConfig, task: Task, device: torch.device) -> Job:
    """What a config trains."""
    assert None not in (config.optimizer, config.lr, config.batch_size, config.epochs, config.schedule)

    def model() -> nn.Module:
        seed_everything(config.seed)
        return task.build_model(config.model)

    return Job(
        config.strategy, model, task.train, task.loss, build_optimizer(str(config.optimizer), float(config.lr or 0)),
        int(config.batch_size or 0), int(config.epochs or 0), registry.build("schedules", str(config.schedule)),
        config.seed, config.clip_norm, config.accumulate, config.autocast, config.num_workers, task.collate_fn,
        task.transformed, device,
    )  # fmt: skip


def _test(model: nn.Module, task: Task, config: RunConfig, device: torch.device) -> dict[str, float]:
    """The metric and the loss on the test set."""
    metric = as_metric(task.metric)
    found = evaluate(
        usual_copy(model), task, solo(), device, batch_size=4 * int(config.batch_size or 1), autocast=config.autocast
    )  # fmt: skip
    return {metric.name: found[metric.name], "loss": found["loss"]}


def _shown(tested: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_metric(value, name)}" for name, value in tested.items())


def summary(record: Record, ledger: Ledger, tested: dict[str, float]) -> dict[str, Any]:
    """What became of a run, and what this rank sent."""
    rows = record.rows
    return {
        "rounds": len(rows), "joined": sum(len(row.joined) for row in rows), "lost": sum(len(row.lost) for row in rows),
        "samples": sum(sum(row.samples.values()) for row in rows), "samples_lost": sum(r.lost_samples for r in rows),
        "threads": torch.get_num_threads(), **{f"test_{name}": value for name, value in tested.items()},
        "sent_by_this_rank": ledger.rows(),
    }  # fmt: skip
