"""BatchNorm's statistics of a whole network, measured anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json, coalesced
from thinwire.exchange.streamed import StreamedModel


@torch.no_grad()
def calibrate_batchnorm(model: nn.Module, recent: Iterable[Tensor], comm: Comm, autocast: bool) -> None:
    """Measure BatchNorm's statistics of a whole network, whose sums have more terms than narrow ones. Collective.

    Each rank runs the network on its own inputs; the statistics are averaged over ranks. Frozen norms, those in eval
    mode, keep their statistics, and so do all where no rank has inputs.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None and m.training]
    if not norms or comm.size == 1:
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
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
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
