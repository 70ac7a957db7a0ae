"""Which singular values of a weight are kept: the rule that gives each layer its layer rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from thinwire.errors import UsageError

DEFAULT_CUTOFF = 0.15  # of the authors of AB-training


def layer_rank_above(sigma: torch.Tensor, cutoff: float) -> int:
    """The number of singular values above `cutoff` times the first, the largest; at least one, if there are any.

    >>> layer_rank_above(torch.tensor([10.0, 5.0, 1.6, 1.5, 0.1]), cutoff=0.15)
    3
    """
    return max(1, int((sigma > cutoff * sigma[0]).sum())) if len(sigma) else 0


def layer_rank_with_energy(sigma: torch.Tensor, energy: float) -> int:
    """The smallest r such that the first r singular values have this share of the energy Σσᵢ².

    The best approximation of W of layer rank r then has a relative error of at most √(1 − energy).

    >>> layer_rank_with_energy(torch.tensor([3.0, 1.0, 1.0, 1.0]), energy=0.8)
    2
    """
    sums = sigma.double().square().cumsum(0)
    return int((sums < energy * sums[-1]).sum()) + 1 if len(sigma) else 0


class RankRule(NamedTuple):
    """How a layer's singular values, sorted by size, decide its layer rank: by `energy` if it is given, or `cutoff`.

    >>> RankRule(cutoff=0.5, min_rank=3).layer_rank(torch.tensor([10.0, 6.0, 1.6, 1.5, 0.1]))
    3
    """

    cutoff: float = DEFAULT_CUTOFF
    energy: float | None = None
    min_rank: int = 1  # smallest layer rank, of layers that have so many singular values

    def layer_rank(self, sigma: torch.Tensor) -> int:
        """The number of singular values that are kept; 0 only if there are none."""
        if self.energy is None:
            kept = layer_rank_above(sigma, self.cutoff)
        else:
            kept = layer_rank_with_energy(sigma, self.energy)
        return max(kept, min(self.min_rank, len(sigma)))

    def __str__(self) -> str:
        first = f"cutoff={self.cutoff}" if self.energy is None else f"energy={self.energy}"
        return first + (f" and min_rank={self.min_rank}" if self.min_rank > 1 else "")


def make_rank_rule(owner: str, cutoff: float | None, energy: float | None, min_rank: int) -> RankRule:
    """The rule of a user's options; raises UsageError if both `cutoff` and `energy` are given."""
    if cutoff is not None and energy is not None:
        raise UsageError(
            f"{owner}: cutoff={cutoff} and energy={energy} are two rules for the same thing; give one of them"
        )
    return RankRule(DEFAULT_CUTOFF if cutoff is None else cutoff, energy, min_rank)
