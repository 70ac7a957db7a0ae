"""The losses of the latest steps, on the device until they are read together: each read waits for a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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

    def take(self) -> tuple[Tensor, dict[str, float]]:
        """The losses of these steps, and the sum of each part; afterwards there are none."""
        totals = torch.stack(self.totals).double().cpu()
        names = dict.fromkeys(name for parts in self.parts for name in parts)
        sums = {
            name: torch.stack([parts[name].double() for parts in self.parts if name in parts]).sum().item()
            for name in names
        }
        self.totals, self.parts = [], []
        return totals, sums
