"""What a rank does before it trains: choose device, seeds, settings and folder, as the other ranks do."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.join import pick_device
from thinwire.comm.patience import default_patience
from thinwire.comm.world import World
from thinwire.common.cores import num_threads
from thinwire.common.tensors import num_bytes
from thinwire.config import LENGTHS, RunConfig, make_config, merge
from thinwire.errors import RunError, ThinwireError, UsageError, unknown
from thinwire.run.records import RunFolder
from thinwire.run.tracking.base import check_tracker
from thinwire.spec import parse
from thinwire.tasks.base import Task

T = TypeVar("T")
ALONE_SECONDS = 7 * 86_400.0  # machines that train alone meet only when the slowest has done its epoch
FALLBACK = {"epochs": 10, "batch_size": 32, "lr": 0.1, "optimizer": "sgd", "schedule": "cosine"}


def seed_everything(seed: int) -> None:
    """Seed every random generator that a task or model may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def fingerprint(model: nn.Module) -> str:
    """A hash of the names, shapes and dtypes in a model's state_dict."""
    shapes = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items()]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def with_defaults(config: RunConfig, task: Task, ranks: int) -> RunConfig:
    """The config with defaults, from the task first, for every setting that was not given."""
    for name in task.defaults:
        if name not in RunConfig.model_fields:
            raise unknown("setting in the task's defaults", name, RunConfig.model_fields)
    own_model = {"model": task.model} if isinstance(task.model, str) else {}
    defaults = merge(FALLBACK, {**own_model, **task.defaults, "ranks": ranks})
    if any(getattr(config, name) is not None for name in LENGTHS):
        defaults = {name: value for name, value in defaults.items() if name not in LENGTHS}
    missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    return make_config(config.model_dump(), missing, source=f"defaults of {config.task}")


def hold_folder(config: RunConfig) -> RunFolder:
    """The folder of the run to resume, or one for a new run. It is held: no other run writes to it."""
    folder = RunFolder.existing(config.out) if config.resume else RunFolder.new(config)
    folder.hold()
    try:
        if not config.resume:
            folder.refuse_used()  # another run may have begun in it meanwhile
    except ThinwireError:
        folder.release()
        raise
    return folder


def open_folder(config: RunConfig, comm: Comm) -> RunFolder:
    """The folder that rank 0 writes to, and holds: that of the run to resume, or one for a new run. Collective."""
    held: list[RunFolder] = []  # on rank 0

    def find() -> tuple[str, bool]:
        if config.track is not None:
            check_tracker(config.track)
        held.append(hold_folder(config))
        return str(held[0].path), held[0].is_held

    try:
        (path, is_held), resumes = _on_rank_0_and_gather(comm, find, own=config.resume)
        not_found = [rank for rank, resume in enumerate(resumes) if not resume]
        if any(resumes) and not_found:
            raise UsageError(
                f"ranks {not_found} find no run in {path} on their machine, and other ranks do; copy the folder there, "
                "with the checkpoints of these ranks, or give another --out to start a new run"
            )
    except ThinwireError:
        for folder in held:
            folder.release()
        raise
    folder = held[0] if held else RunFolder(Path(path))
    folder.is_held = is_held
    return folder


def choose_device(config: RunConfig, world: World | None) -> torch.device:
    """The device on which this rank computes."""
    if config.device == "cpu":
        return torch.device("cpu")
    device = pick_device(world)
    if config.device == "cuda" and device.type != "cuda":
        raise UsageError(
            "--device cuda, but torch finds no GPU here; use --device cpu or install a CUDA build of torch"
        )
    return device


def use_device(config: RunConfig, world: World | None) -> torch.device:
    """Choose this rank's device and make it torch's; share the cores with other ranks unless OMP_NUM_THREADS is set."""
    device = choose_device(config, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_threads(world.local_size if world else 1))
    return device


def suit_patience(config: RunConfig, comm: Comm, model: nn.Module, rate_mbit: float | None) -> None:
    """If no patience was asked for, be as patient in training as a model on a link of this rate needs."""
    if config.patience is None:
        model_bytes = sum(map(num_bytes, (*model.parameters(), *model.buffers())))
        seconds = default_patience(model_bytes, comm.size, rate_mbit)
        comm.be_patient(max(seconds, ALONE_SECONDS) if parse(config.strategy).name == "alone" else seconds)


def on_rank_0(comm: Comm, function: Callable[[], T]) -> T:
    """Call a function on rank 0 alone; every rank gets its result, which must be JSON, or its error. Collective."""
    return _on_rank_0_and_gather(comm, function)[0]


def _on_rank_0_and_gather(comm: Comm, function: Callable[[], T], own: Any = None) -> tuple[T, list[Any]]:
    """The result of a function on rank 0, and the value `own` of every rank. Collective."""
    message: dict[str, Any] = {"own": own}
    if comm.rank == 0:
        try:
            message["result"] = function()
        except ThinwireError as error:
            message |= {"error": str(error), "usage": isinstance(error, UsageError)}
    with comm.ledger.purpose("start"):
        messages = all_gather_json(comm, message)
    first = messages[0]
    if "error" in first:
        raise (UsageError if first["usage"] else RunError)(first["error"])
    return first["result"], [one["own"] for one in messages]
