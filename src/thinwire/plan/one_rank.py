"""A step of one rank alone, without a strategy: what steps of strategies are compared with."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch

from thinwire.common.batches import map_tensors
from thinwire.data import Shard
from thinwire.exchange.gradients import NoExchange
from thinwire.plan.recorded_run import Training
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe


def step_of_one_rank(training: Training, recipe: Recipe, ranks: int) -> Callable[[], float]:
    """A step of a copy of the model on one rank's share of a batch, without exchange; returns the seconds."""
    model, batch = copy.deepcopy(training.model), training.batches(Shard(0, ranks))[0]
    learner, exchange = Learner(model, recipe), NoExchange(model)

    def step() -> float:
        begin = time.perf_counter()
        learner.backward(map_tensors(batch, torch.clone), exchange)
        learner.update()
        wait_for_gpu()
        return time.perf_counter() - begin

    return step


def wait_for_gpu() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
