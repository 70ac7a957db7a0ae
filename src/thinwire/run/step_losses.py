"""The losses of the latest steps, on the device until they are read together: each read waits for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class PartSum(NamedTuple):
    """The sum of a number that the loss returned, over the steps in which it did."""

    total: float
    num_steps: int


class StepLosses:
    """Losses of steps that were not read yet, and further numbers that the loss returned."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.parts: list[Mapping[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self.totals)

    def add(self, total: Tensor, parts: Mapping[str, Tensor]) -> None:
        """The loss of a step, and its parts."""
        self.totals.append(total)
        self.parts.append(parts)

    def take(self) -> tuple[Tensor, dict[str, PartSum]]:
        """The losses of these steps, and the sum of each part; afterwards there are none."""
        totals = torch.stack(self.totals).double().cpu()
        found: dict[str, list[Tensor]] = {}
        for parts in self.parts:
            for name, part in parts.items():
                found.setdefault(name, []).append(part.double())
        sums = {name: PartSum(torch.stack(values).sum().item(), len(values)) for name, values in found.items()}
        self.totals, self.parts = [], []
        return totals, sums
