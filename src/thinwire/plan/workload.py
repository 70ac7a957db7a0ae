"""The workload of a task and its settings: its model, or a small one in its place if that cannot be run here."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire import registry
from thinwire.common.batches import map_tensors
from thinwire.common.memory import free_memory
from thinwire.common.tensors import num_bytes
from thinwire.config import RunConfig
from thinwire.data import Batch, Loader, Shard, to_device
from thinwire.losses import BatchLoss
from thinwire.optim import build_optimizer
from thinwire.plan.recorded_run import Training
from thinwire.plan.timing import Effort
from thinwire.strategies.recipe import Recipe
from thinwire.surgery.costs import activation_bytes
from thinwire.tasks.base import Task

MEMORY_FACTOR = 8  # memory of training over that of the weights: gradients, moments, snapshots and what is exchanged
LONGEST_STEP_SECONDS = 3.0  # a step that would take longer is not timed with the real model
STAND_IN_DEPTH, STAND_IN_WIDTH, STAND_IN_BATCH = 32, 256, 16
MATRIX_SIZE, MEASURED_SECONDS = 512, 0.2


class TaskWorkload:
    """What a config trains; its settings must be filled in.

    `flops_per_second` is the computing rate of a rank, if that is not this machine's.
    """

    def __init__(self, config: RunConfig, task: Task, flops_per_second: float | None = None) -> None:
        assert config.epochs is not None
        assert config.batch_size is not None
        self.config, self.task, self.epochs, self.batch_size = config, task, config.epochs, config.batch_size
        self.flops_per_second = flops_per_second
        self._known: dict[int, Batch] = {}

    # ---- as a planner sees it

    def steps_per_epoch(self, ranks: int) -> int:
        return max(1, len(self._loader(ranks, Shard(0, 1))))

    def training(self, ranks: int, epochs: int, most_steps: int) -> Training:
        def batches(shard: Shard) -> Sequence[Batch]:
            full, tail = self._loader(ranks, shard).sizes()
            sizes = [self.batch_size * ranks] * full + [tail] * (tail > 0)
            return [self._batch(size // shard.count) for size in sizes[: most_steps - 1] + sizes[most_steps - 1 :][-1:]]

        return Training(self.model, self._recipe(ranks, epochs), batches, epochs)

    def stand_in(self, ranks: int, epochs: int, most_steps: int) -> Training:
        if self.is_timed:
            return self.training(ranks, epochs, most_steps)
        optimizer = build_optimizer(self.config.optimizer or "sgd", 1e-4)

        def batches(shard: Shard) -> Sequence[Batch]:
            inputs = torch.ones(STAND_IN_BATCH * ranks // shard.count, STAND_IN_WIDTH)
            return [(inputs, inputs)] * most_steps

        return Training(stand_in_model(), Recipe(nn.functional.mse_loss, optimizer), batches, epochs)

    def effort(self, ranks: int) -> Effort:
        if self.is_timed:
            return Effort()
        flops, kept = self.step_cost
        rate = self.flops_per_second or machine_flops()
        x = torch.ones(STAND_IN_BATCH, STAND_IN_WIDTH)
        _, small_kept = count_step(stand_in_model(), (x, x), BatchLoss(nn.functional.mse_loss))
        return Effort(flops / rate, kept / small_kept, machine_flops() / rate)

    # ---- the model

    @cached_property
    def fits(self) -> bool:
        """Whether all that training keeps of the model fits in half of the free memory."""
        needed = MEMORY_FACTOR * sum(map(num_bytes, self.meta_model.parameters())) + self.step_cost[1]
        return needed < free_memory() / 2

    @cached_property
    def is_timed(self) -> bool:
        """Whether steps of the model itself are timed, and not those of a small one in its place."""
        is_short = self.step_cost[0] / machine_flops() < LONGEST_STEP_SECONDS
        return self.fits and is_short and self.flops_per_second is None

    @cached_property
    def model(self) -> nn.Module:
        """The model that is recorded; on the meta device if it cannot be run here."""
        if not self.fits:
            return self.meta_model
        torch.manual_seed(self.config.seed)
        return self.task.build_model(self.config.model)

    @cached_property
    def meta_model(self) -> nn.Module:
        """The model without memory; the real one if it cannot be made so."""
        try:
            with torch.device("meta"):
                return self.task.build_model(self.config.model)
        except Exception:
            return self.task.build_model(self.config.model)

    @cached_property
    def step_cost(self) -> tuple[float, int]:
        """Operations of a rank's step, and the bytes that its forward pass keeps.

        They are counted on the meta device or, if the model reads values there, in a real step.
        """
        batch, loss = self._batch(self.batch_size), self.task.batch_loss
        try:
            return count_step(self.meta_model, to_device(batch, torch.device("meta")), loss)
        except Exception:
            model = self.task.build_model(self.config.model)
            return count_step(model, map_tensors(batch, torch.clone), loss)

    # ---- how it is trained

    def _recipe(self, ranks: int, epochs: int) -> Recipe:
        config, steps = self.config, self.steps_per_epoch(ranks)
        factor = registry.build("schedules", config.schedule or "constant")
        return Recipe(
            self.task.loss, build_optimizer(config.optimizer or "sgd", config.lr or 0.1),
            lambda step: float(factor(min(epochs, (step + 0.5) / steps), epochs)), config.clip_norm,
            config.accumulate, config.autocast, epochs,
        )  # fmt: skip

    def _loader(self, ranks: int, shard: Shard) -> Loader:
        return Loader(self.task.train, shard, self.batch_size, ranks=ranks, collate_fn=self.task.collate_fn)

    def _batch(self, size: int) -> Batch:
        """So many of the first samples, as a step gets them; what is sent does not depend on which they are."""
        if size not in self._known:
            count = len(self.task.train)  # type: ignore[arg-type]
            batch = self.task.collate_fn([self.task.train[i % count] for i in range(size)])
            self._known[size] = self.task.transformed(batch, torch.Generator())
        return self._known[size]


def stand_in_model() -> nn.Sequential:
    """A model that takes the place of one that cannot be run here, to time what strategies do besides computing.

    Its weights keep the size of activations: numbers close to zero would be slow.
    """
    layers = [layer for _ in range(STAND_IN_DEPTH) for layer in (nn.Linear(STAND_IN_WIDTH, STAND_IN_WIDTH), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)  # type: ignore[arg-type]
    return nn.Sequential(*layers)


def count_step(model: nn.Module, batch: Batch, loss: BatchLoss) -> tuple[float, int]:
    """Operations of a forward and a backward pass, and the bytes that the first keeps for the second."""
    with FlopCounterMode(display=False) as counter:
        with activation_bytes(model) as kept:
            total = loss(model, batch).total
        total.backward()
    for p in model.parameters():
        p.grad = None
    return float(counter.get_total_flops()), sum(kept.values())


@functools.cache
def machine_flops() -> float:
    """Operations per second of a matrix product, in this process, on its threads."""
    a, b = torch.randn(MATRIX_SIZE, MATRIX_SIZE), torch.randn(MATRIX_SIZE, MATRIX_SIZE)
    a @ b
    begin, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < MEASURED_SECONDS:
        a @ b
        count += 1
    return 2 * MATRIX_SIZE**3 * count / elapsed
