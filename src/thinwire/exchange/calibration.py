"""BatchNorm's statistics of a model whose weights no rank trained as they are, measured anew on recent inputs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json, coalesced
from thinwire.common.dtypes import bfloat16_autocast
from thinwire.exchange.streamed import StreamedModel


class RecentInputs:
    """Copies of the last batches of inputs that a rank trained on; none if the model has no BatchNorm statistics."""

    def __init__(self, model: nn.Module, number: int, device: torch.device) -> None:
        has_statistics = any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())
        self.batches: deque[Tensor] = deque(maxlen=number if has_statistics else 0)
        self.device = device

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)

    def keep(self, inputs: Tensor) -> None:
        """Copy a batch of inputs, into the memory of the oldest one if that has the same shape."""
        if not self.batches.maxlen:
            return
        memory = self.batches.popleft() if len(self.batches) == self.batches.maxlen else None
        if memory is None or (memory.shape, memory.dtype) != (inputs.shape, inputs.dtype):
            memory = torch.empty_like(inputs, device=self.device)
        self.batches.append(memory.copy_(inputs.detach()))

    def load(self, saved: Iterable[Tensor]) -> None:
        """Keep the inputs of a saved state instead."""
        self.batches.clear()
        self.batches.extend(x.to(self.device, copy=True) for x in saved)


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
def calibrate_batchnorm(model: nn.Module, recent: Iterable[Tensor], comm: Comm, autocast: bool) -> None:
    """Measure BatchNorm's statistics of a model on recent inputs. Collective.

    For models put together of what ranks trained: their statistics do not follow from those of the ranks. Each rank
    runs the model on its own inputs; the statistics are averaged over ranks. Frozen norms, those in eval mode, keep
    their statistics, and so do all where no rank has inputs.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None and m.training]
    if not norms:
        return
    inputs = list(recent)
    mine = [len(inputs), list(inputs[0].shape), str(inputs[0].dtype)] if inputs else [0, [], ""]
    of_ranks = all_gather_json(comm, mine)
    total, (most, shape, dtype) = sum(number for number, _, _ in of_ranks), max(of_ranks)
    if not total:
        return
    statistics = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
    with _cumulative_statistics(model, norms):
        for x in inputs:
            with bfloat16_autocast(x.device, autocast):
                model(x)
        if isinstance(model, StreamedModel):  # all ranks must run it equally often
            model.eval()
            for _ in range(most - len(inputs)):
                zeros_dtype = getattr(torch, dtype.removeprefix("torch."))
                model(torch.zeros(shape, dtype=zeros_dtype, device=statistics[0].device))
        coalesced(statistics, lambda flat: comm.sum(flat * (len(inputs) / total)))


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
