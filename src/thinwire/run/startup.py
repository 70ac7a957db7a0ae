"""What a rank does before it trains: device, seeds, settings and folder, agreed with the other ranks."""

from __future__ import annotations

import hashlib
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
from thinwire.comm.world import World
from thinwire.config import RunConfig, make_config
from thinwire.errors import RunError, ThinwireError, UsageError, unknown
from thinwire.run.records import RunFolder
from thinwire.tasks.base import Task

T = TypeVar("T")
FALLBACK = {"epochs": 10, "batch_size": 32, "lr": 0.1, "optimizer": "sgd", "schedule": "cosine"}


def seed_everything(seed: int) -> None:
    """Seed every random generator that a task or model may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def fingerprint(model: nn.Module) -> str:
    """Differs for models whose state does not fit each other."""
    shapes = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items()]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def with_defaults(config: RunConfig, task: Task, comm: Comm) -> RunConfig:
    """The config with every open setting filled in from the task."""
    for name in task.defaults:
        if name not in RunConfig.model_fields:
            raise unknown("setting in the task's defaults", name, RunConfig.model_fields)
    own_model = {"model": task.model} if isinstance(task.model, str) else {}
    filled = {**FALLBACK, **own_model, **task.defaults, "ranks": comm.size}
    open_settings = {name: value for name, value in filled.items() if getattr(config, name) is None}
    return make_config(config.model_dump(), open_settings, source=f"defaults of {config.task}")


def open_folder(config: RunConfig, comm: Comm) -> RunFolder:
    """The folder that rank 0 chose to write to: that of the run to resume, or one for a new run. Collective."""
    path, resumes = _together(
        comm,
        lambda: str((RunFolder.existing(config.out) if config.resume else RunFolder.new(config)).path),
        mine=config.resume,
    )
    without = [rank for rank, resume in enumerate(resumes) if not resume]
    if any(resumes) and without:
        raise UsageError(
            f"on their machine ranks {without} find no run in {path}, and others do; bring the folder there, with the "
            "checkpoints of these ranks, or give another --out to start anew"
        )
    return RunFolder(Path(path))


def choose_device(config: RunConfig, world: World | None) -> torch.device:
    """Where this rank computes."""
    if config.device == "cpu":
        return torch.device("cpu")
    device = pick_device(world)
    if config.device == "cuda" and device.type != "cuda":
        raise UsageError(
            "--device cuda, but torch finds no GPU here; use --device cpu or install a CUDA build of torch"
        )
    return device


def agree(comm: Comm, run: Callable[[], T]) -> T:
    """Do something on rank 0 alone and give every rank its JSON result, or its error."""
    return _together(comm, run)[0]


def _together(comm: Comm, run: Callable[[], T], mine: Any = None) -> tuple[T, list[Any]]:
    """The same, and what every rank has to tell."""
    answer: dict[str, Any] = {"mine": mine}
    if comm.rank == 0:
        try:
            answer["value"] = run()
        except ThinwireError as error:
            answer |= {"error": str(error), "usage": isinstance(error, UsageError)}
    with comm.ledger.purpose("start"):
        answers = all_gather_json(comm, answer)
    first = answers[0]
    if "error" in first:
        raise (UsageError if first["usage"] else RunError)(first["error"])
    return first["value"], [one["mine"] for one in answers]
