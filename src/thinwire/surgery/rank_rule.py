"""Which singular values of a weight are kept: the rule that gives each layer its layer rank."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RankRule(NamedTuple):
    """How a layer's singular values, sorted by size, decide its layer rank: those above cutoff·σ₁, at least `min_rank`.

    >>> sigma = torch.tensor([10.0, 5.0, 1.6, 1.5, 0.1])
    >>> RankRule(cutoff=0.15).layer_rank(sigma), RankRule(cutoff=0.5, min_rank=3).layer_rank(sigma)
    (3, 3)
    """

    cutoff: float
    min_rank: int = 1  # smallest layer rank, of layers that have so many singular values

    def layer_rank(self, sigma: torch.Tensor) -> int:
        """The number of singular values that are kept; 0 only if there are none."""
        if not len(sigma):
            return 0
        return max(int((sigma > self.cutoff * sigma[0]).sum()), min(self.min_rank, len(sigma)))

    def __str__(self) -> str:
        return f"cutoff={self.cutoff}" + (f" and min_rank={self.min_rank}" if self.min_rank > 1 else "")
