"""Tensors of a module, and what they take."""

from __future__ import annotations

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and those buffers that are part of the model's state, each once."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}


def num_bytes(tensor: Tensor) -> int:
    """The size of a tensor's data."""
    return tensor.numel() * tensor.element_size()
