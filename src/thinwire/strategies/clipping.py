"""The norm of a model's gradient, and clipping by it, in as few kernels as possible."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

SMALL = 1e-6  # added to a norm that is divided by, as torch does


def are_alike(parameters: Collection[Tensor]) -> bool:
    """Whether one kernel can take all: they have one device and one dtype, which can hold the norm of them all."""
    kinds = {(p.device, p.dtype) for p in parameters}
    return len(kinds) == 1 and not any(dtype == torch.float16 for _, dtype in kinds)


@torch.no_grad()
def gradient_norm(gradients: list[Tensor], alike: bool) -> Tensor:
    """‖g‖ = √Σ‖gᵢ‖² of all gradients together; bit for bit that of torch's clip_grad_norm_.

    >>> gradient_norm([torch.tensor([3.0]), torch.tensor([[4.0]])], alike=True)
    tensor(5.)
    """
    if alike and gradients:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        return norm
    return nn.utils.get_total_norm([g.float() if g.dtype == torch.float16 else g for g in gradients])


@torch.no_grad()
def clip_gradients(
    parameters: list[Tensor], gradients: list[Tensor], max_norm: float, norm: Tensor, alike: bool
) -> None:
    """g ← g·min(1, max_norm/‖g‖), in place; bit for bit as torch's clip_grad_norm_ does."""
    if alike and gradients:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + SMALL), max=1.0))
    else:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
