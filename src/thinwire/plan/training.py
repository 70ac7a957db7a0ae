"""The training run that a task and its settings describe, with batches of the right sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import default_collate

from thinwire import registry
from thinwire.config import RunConfig
from thinwire.data import Batch, Loader, Shard
from thinwire.plan.schedule import Training
from thinwire.strategies.learner import Recipe
from thinwire.tasks.base import Task


def training_of(config: RunConfig, task: Task, ranks: int, epochs: int, most_steps: int | None = None) -> Training:
    """The run of a config whose settings are filled in; with `most_steps`, only the first steps of each epoch.

    All batches are the same samples: what is sent does not depend on them.
    """
    assert config.batch_size is not None
    assert config.lr is not None
    torch.manual_seed(config.seed)
    model = task.build_model(config.model)
    factor = registry.build("schedules", config.schedule or "constant")
    loader = Loader(task.train, Shard(0, 1), config.batch_size, ranks=ranks)
    known: dict[int, Batch] = {}
    recipe = Recipe(
        loss=task.loss, optimizer=registry.build("optimizers", config.optimizer or "sgd", config.lr),
        schedule=lambda step: float(factor((step + 0.5) / len(loader), epochs)), clip_norm=config.clip_norm,
        accumulate=config.accumulate, autocast=config.autocast, epochs=epochs,
    )  # fmt: skip

    def batches(shard: Shard) -> Sequence[Batch]:
        loader.follow(shard)
        full, tail = loader._sizes()
        sizes = ([loader.batch_size * ranks] * full + [tail] * (tail > 0))[:most_steps]
        return [known.setdefault(size // shard.count, _batch(task, size // shard.count)) for size in sizes]

    return Training(model, recipe, batches, epochs)


def _batch(task: Task, size: int) -> Batch:
    """A batch of the first samples, as a step gets it."""
    count = len(task.train)  # type: ignore[arg-type]
    inputs, targets = default_collate([task.train[i % count] for i in range(size)])
    return task.transform(inputs, torch.Generator()), targets
