"""Losses and gradients that are not finite: found at once on a CPU, every few steps on a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.errors import RunError

CHECK_EVERY_STEPS = 20  # how often losses and gradients on a GPU are checked; each check waits for the GPU


class FiniteCheck:
    """The loss and the norm of the gradient of steps that are not yet checked."""

    def __init__(self) -> None:
        self._unchecked: list[Tensor] = []  # losses and norms, in turn

    def add(self, loss: Tensor, norm: Tensor, step: int) -> None:
        """Note a step, counted from 1; raise RunError if this or a step before it was not finite, if a check is due."""
        self._unchecked += [loss, norm]
        if not norm.is_cuda or len(self._unchecked) >= 2 * CHECK_EVERY_STEPS:
            self.check(step)

    def check(self, step: int) -> None:
        """Raise RunError if one of the noted steps, the last of which is given, was not finite. Waits for a GPU."""
        if not self._unchecked:
            return
        values = torch.stack([value.float() for value in self._unchecked]).tolist()
        self._unchecked.clear()
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise not_finite_error(step + 1 + (i - len(values)) // 2, value if i % 2 == 0 else None)


def not_finite_error(step: int, loss: float | None) -> RunError:
    """The error for a step whose loss is not finite, or, if loss is None, whose gradient is not."""
    what = "the gradient is not finite" if loss is None else f"the loss is {loss}"
    return RunError(
        f"{what} at step {step}; try a lower --lr, a warm-up (--schedule 'cosine(warmup_epochs=1)') or --clip-norm 1"
    )
