"""BatchNorm's statistics of a model whose weights no rank trained as they are, measured anew on recent inputs."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json, coalesced
from thinwire.common.batches import batch_of, map_tensors, plain_of, tensors_of
from thinwire.common.dtypes import bfloat16_autocast
from thinwire.exchange.streamed import StreamedModel

Run = Callable[[nn.Module, Any], Any]  # (model, inputs): a forward pass


class RecentInputs:
    """Copies of the last batches of inputs that a rank trained on; none if the model has no BatchNorm statistics."""

    def __init__(self, model: nn.Module, number: int, device: torch.device) -> None:
        has_statistics = any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())
        self.batches: deque[Any] = deque(maxlen=number if has_statistics else 0)
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def keep(self, inputs: Any) -> None:
        """Copy a batch of inputs, into the memory of the oldest one where that has the same shapes."""
        if not self.batches.maxlen:
            return
        oldest = self.batches.popleft() if len(self.batches) == self.batches.maxlen else None
        free = tensors_of(oldest)

        def copied(tensor: Tensor) -> Tensor:
            memory = free.pop(0) if free else None
            if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
                memory = torch.empty_like(tensor, device=self.device)
            return memory.copy_(tensor.detach())

        self.batches.append(map_tensors(inputs, copied))

    def state(self) -> list[Any]:
        """The inputs for a state, as tensors in plain dicts and lists."""
        return [plain_of(inputs, lambda tensor: tensor) for inputs in self.batches]

    def load(self, saved: Iterable[Any]) -> None:
        """Keep the inputs of a saved state instead."""
        self.batches.clear()
        self.batches.extend(batch_of(inputs, lambda t: t.to(self.device, copy=True)) for inputs in saved)


def steps_to_forget(model: nn.Module) -> float:
    """After so many steps the earlier part of BatchNorm's running statistics has a weight below 1 %.

    Each step keeps 1 − momentum of them; with momentum=None, the mean of all steps, they are never forgotten.

    >>> round(steps_to_forget(nn.BatchNorm1d(3)), 1), steps_to_forget(nn.Linear(3, 3))
    (43.7, 0.0)
    """
    momenta = [m.momentum for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not all(momenta):
        return math.inf
    return max((math.log(0.01) / math.log1p(-min(m, 0.99)) for m in momenta if m), default=0.0)


@torch.no_grad()
def calibrate_batchnorm(model: nn.Module, recent: Iterable[Any], comm: Comm, run: Run, autocast: bool) -> None:
    """Measure BatchNorm's statistics of a model on recent inputs, by run(model, inputs). Collective.

    For models put together of what ranks trained: their statistics do not follow from those of the ranks. Each rank
    runs the model on its own inputs; the statistics are averaged over ranks. Frozen norms, those in eval mode, keep
    their statistics, and so do all where no rank has inputs.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None and m.training]
    if not norms:
        return
    inputs = list(recent)
    of_ranks = all_gather_json(comm, [len(inputs), plain_of(inputs[0], _shape_and_dtype) if inputs else None])
    total, (most, shapes) = sum(number for number, _ in of_ranks), max(of_ranks, key=lambda one: one[0])
    if not total:
        return
    statistics = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
    with _cumulative_statistics(model, norms):
        for x in inputs:
            with bfloat16_autocast(statistics[0].device, autocast):
                run(model, x)
        if isinstance(model, StreamedModel):  # all ranks must run it equally often
            model.eval()
            for _ in range(most - len(inputs)):
                run(model, batch_of(shapes, functools.partial(_zeros, statistics[0].device)))
        coalesced(statistics, lambda flat: comm.sum(flat * (len(inputs) / total)))


def _shape_and_dtype(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _zeros(device: torch.device, shape_and_dtype: list[Any]) -> Tensor:
    shape, dtype = shape_and_dtype
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


@contextmanager
def _cumulative_statistics(model: nn.Module, norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Inside, norms begin anew and take the plain mean over batches (momentum=None); all else is in eval mode."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum, norm.num_batches_tracked = None, torch.zeros_like(norm.num_batches_tracked)  # type: ignore[arg-type]
    yield
    for module, training in modes.items():
        module.training = training
    for norm, momentum, tracked in before:
        norm.momentum, norm.num_batches_tracked = momentum, tracked
