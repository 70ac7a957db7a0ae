"""The order of an image's elements in memory: channels_last, in which GPUs compute convolutions fastest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
FAST_ON = {"cuda"}  # types of devices on which convolutions get channels_last weights; others compute as before


def use_channels_last(model: nn.Module) -> bool:
    """Give convolutions on a GPU channels_last weights, which their outputs follow; returns whether there are any.

    Values, shapes and names stay the same. In the usual order, cuDNN would convert every image there and back, and
    BatchNorm would take three times as long.
    """
    found = False
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, CONVOLUTIONS) else None  # else it is computed
        if weight is not None and weight.device.type in FAST_ON:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
            found = True
    return found


def keep_outputs_contiguous(model: nn.Module) -> None:
    """Let convolutions return tensors in the usual order, for a model that calls `view` on them."""
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            module.register_forward_hook(_make_contiguous)


def compute_in_any_order(model: nn.Module, compute: Callable[[], T]) -> T:
    """compute(). If the model calls `view` on what a convolution returns, convolutions return the usual order."""
    try:
        return compute()
    except RuntimeError as error:
        if not is_view_error(error):
            raise
        keep_outputs_contiguous(model)
        return compute()


def usual_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with all weights in the usual order, and without the hooks of `keep_outputs_contiguous`."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        weight = module._parameters.get("weight") if isinstance(module, CONVOLUTIONS) else None
        if weight is not None:
            weight.data = weight.data.contiguous()
        for key, hook in list(module._forward_hooks.items()):
            if hook is _make_contiguous:
                del module._forward_hooks[key]
    return copied


class ForwardState:
    """What a forward pass changes: buffers, and the generators of random numbers. To repeat one that failed."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self.random = torch.get_rng_state()
        self.random_on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the changes, also where a forward pass replaces a buffer instead of writing to it."""
        for module, name, buffer, value in self.buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)
        torch.set_rng_state(self.random)
        if self.random_on_gpu is not None:
            torch.cuda.set_rng_state(self.random_on_gpu, self.device)


def _make_contiguous(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.contiguous()


def is_view_error(error: RuntimeError) -> bool:
    """Whether an error says that `view` was called on a tensor in another order than the usual one."""
    return any(words in str(error) for words in ("view size is not compatible", "Cannot view a tensor with shape"))


@torch.no_grad()
def in_order_of(parameter: Tensor, value: Any) -> Any:
    """A gradient or moment of a parameter in its order, as fused optimizers need it; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.layout != torch.strided:
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
