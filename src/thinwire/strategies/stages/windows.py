"""Interlocking backpropagation: which local loss trains which block, and which gradients cross which boundary."""

from __future__ import annotations

from typing import Literal, NamedTuple

Losses = Literal["sum", "farthest"]


class LossWindow(NamedTuple):
    """Loss L_j, behind block j, reaches back through the `size` blocks that end with j.

    So block k is in reach of L_k … L_{k+size−1}. It is trained by the sum of these, or by the farthest alone, the last.
    """

    num_blocks: int
    size: int
    losses: Losses

    def is_used(self, loss: int) -> bool:
        """Whether a loss trains any block."""
        return self.losses == "sum" or loss >= self.size - 1 or loss == self.num_blocks - 1

    def training(self, block: int) -> list[int]:
        """The losses that train a block, nearest first.

        >>> LossWindow(4, 2, "sum").training(1), LossWindow(4, 2, "farthest").training(1)
        ([1, 2], [2])
        """
        in_reach = range(block, min(block + self.size, self.num_blocks))
        return list(in_reach) if self.losses == "sum" else [in_reach[-1]]

    def crossing(self, block: int) -> list[int]:
        """The losses whose gradients go through a block to the block before it, nearest first.

        >>> LossWindow(4, 3, "sum").crossing(1), LossWindow(4, 3, "sum").crossing(0)
        ([1, 2], [])
        """
        in_reach = range(block, min(block + self.size - 1, self.num_blocks)) if block > 0 else range(0)
        return [loss for loss in in_reach if self.is_used(loss)]

    def training_and_crossing(self, block: int) -> int | None:
        """The loss, if any, that alone trains a block and then crosses it: one backward pass gives both gradients."""
        farthest = self.crossing(block)[-1:]
        return farthest[0] if farthest == self.training(block) else None
