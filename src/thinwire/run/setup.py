"""What a config asks for: the length of a run, its loader, its recipe, and what its checkpoints must agree with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.config import MAY_CHANGE, RunConfig
from thinwire.data import Loader, Shard, loader
from thinwire.optim import LearningRateWatch, OptimizerFactory, build_optimizer
from thinwire.run.length import Length
from thinwire.run.network import LinkReport
from thinwire.run.startup import fingerprint
from thinwire.strategies.base import Strategy
from thinwire.strategies.recipe import Recipe
from thinwire.tasks.base import Task


def find_length(config: RunConfig, task: Task, ranks: int) -> Length:
    """The length of a run. Its epochs are as long for any shard."""
    try:
        epoch_steps: int | None = len(loader_of(config, task, ranks, Shard(0, 1), None))
    except TypeError:  # a stream
        epoch_steps = None
    return Length(config.epochs, config.steps, epoch_steps)


def loader_of(config: RunConfig, task: Task, ranks: int, shard: Shard, device: torch.device | None) -> Loader:
    """The training batches of a shard."""
    assert config.batch_size is not None
    return loader(
        task.train, shard, config.batch_size, seed=config.seed, ranks=ranks, num_workers=config.num_workers,
        device=device, collate_fn=task.collate_fn,
    )  # fmt: skip


def optimizer_of(config: RunConfig) -> OptimizerFactory:
    """The optimizer that a config names."""
    assert config.optimizer is not None
    assert config.lr is not None
    return build_optimizer(config.optimizer, config.lr)


def recipe_of(config: RunConfig, task: Task, length: Length, optimizer: LearningRateWatch) -> Recipe:
    """The recipe of a run; the optimizer is watched if learning rates are logged."""
    assert config.schedule is not None
    return Recipe(
        loss=task.loss,
        optimizer=optimizer if config.log_every else optimizer.factory,
        schedule=length.schedule(registry.build("schedules", config.schedule)),
        clip_norm=config.clip_norm,
        accumulate=config.accumulate,
        autocast=config.autocast,
        epochs=length.num_epochs,
        steps=length.steps,
        compile=config.compile,
    )


def identity(config: RunConfig, model: nn.Module, strategy: Strategy, batches: Loader) -> dict[str, Any]:
    """What a checkpoint must have been made with."""
    new = {name for name in ("compile", "metric") if not getattr(config, name)}  # settings that earlier versions lack
    shards = strategy.shard.count
    return {
        **config.model_dump(mode="json", exclude=MAY_CHANGE | new),
        "samples": batches.num_samples,
        "weights": fingerprint(model),
        **({"shards": shards} if shards < batches.ranks else {}),  # earlier versions had smaller batches
    }


def tracked_settings(config: RunConfig, comm: Comm, link: LinkReport) -> dict[str, Any]:
    """What a tracker is told of a run before its first row: the settings that have a value, and the network."""
    settings = config.model_dump(mode="json", exclude_none=True, exclude={"resume", "track"})
    network = {"link_state": link.state, "link_rate_mbit": link.rate_mbit, "link_latency_ms": link.latency_ms}
    known = {name: value for name, value in network.items() if value is not None}
    return {**settings, "ranks": comm.size, "nodes": len(set(comm.nodes)), **known}
