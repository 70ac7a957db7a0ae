"""Buffers that ranks average exactly, such as BatchNorm's statistics, in few operations however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.common.dtypes import is_averaged
from thinwire.common.tensors import flatten, named_persistent_buffers, unflatten


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Persistent buffers of floating-point or complex numbers; others are counters."""
    return [b for b in named_persistent_buffers(model).values() if is_averaged(b)]


class Statistics(NamedTuple):
    """A model's averaged buffers when they were sent, and their mean; one vector for each dtype."""

    sent: list[Tensor]
    mean: list[Tensor]  # first what was sent; replaced in place

    @torch.no_grad()
    def merge_into(self, model: nn.Module) -> None:
        """b ← mean + (b − sent): what a buffer has gained since it was sent is kept, and infinite ones stay."""
        for same, sent, mean in zip(_by_dtype(averaged_buffers(model)), self.sent, self.mean, strict=True):
            now = flatten(same)
            merged = torch.where(now == sent, mean, mean + (now - sent))
            torch._foreach_copy_(same, unflatten(merged, same))


@torch.no_grad()
def take_statistics(model: nn.Module) -> Statistics:
    """A copy of a model's averaged buffers, to be sent."""
    sent = [flatten(same) for same in _by_dtype(averaged_buffers(model))]
    return Statistics(sent, [vector.clone() for vector in sent])


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[t for t in tensors if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]
