"""A step in which nothing is computed: gradients are zeros, and only what a strategy sends is as in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.exchange.gradients import GradientExchange


def rehearse_backward(model: nn.Module, exchange: GradientExchange, exchanging: bool) -> Tensor:
    """Give every parameter a gradient of zeros, and exchange them or not; returns a loss of 0."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    if exchanging:
        exchange.finish()
    return torch.zeros((), device=next(model.parameters()).device)


def rehearse_update(optimizer: torch.optim.Optimizer) -> None:
    """Take the first step of an optimizer, which makes its moments; later steps would not change what is sent."""
    if not optimizer.state:
        optimizer.step()
    optimizer.zero_grad()
