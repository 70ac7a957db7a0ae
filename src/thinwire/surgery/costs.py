"""What modules cost: their floating-point operations, their running time, and the activations between them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire.errors import UsageError

TIMED_RUNS = 3


@torch.no_grad()
def activations(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The input of each module, and the output of the last, when they run one after the other in eval mode."""
    seen = [x]
    for module in modules:
        modes = {m: m.training for m in module.modules()}
        try:
            out = module.eval()(seen[-1].clone())
        finally:
            for m, mode in modes.items():
                m.training = mode
        if not isinstance(out, Tensor) or not out.is_floating_point():
            what = str(out.dtype) if isinstance(out, Tensor) else type(out).__name__
            raise UsageError(
                f"a layer that the model may be cut at passes on {what}; blocks pass on one tensor of floats"
            )
        seen.append(out)
    return seen


def flops(module: nn.Module, x: Tensor, *, input_gradient: bool, weights: bool = True) -> int:
    """Floating-point operations of matrix products, attention and convolutions in a forward and a backward pass.

    `input_gradient` and `weights` say whether the backward pass computes the gradient of the input, and of the
    weights. The module runs on the meta device, or, if it cannot run there, as a copy on its own device.

    >>> flops(nn.Linear(8, 4), torch.ones(2, 8), input_gradient=False)  # 2·2·8·4 forward, and as many for the weights
    256
    """
    try:
        return _count_flops(_meta_copy(module), x.to("meta"), input_gradient, weights)
    except (RuntimeError, NotImplementedError):  # an operation that reads values
        return _count_flops(copy.deepcopy(module), x, input_gradient, weights)


def _count_flops(module: nn.Module, x: Tensor, input_gradient: bool, weights: bool) -> int:
    if not weights:
        module.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        _forward_backward(module.eval(), x, input_gradient)
    return int(counter.get_total_flops())


def _meta_copy(module: nn.Module) -> nn.Module:
    """A copy on the meta device, made without copying any weight."""
    memo: dict[int, Any] = {id(b): b.detach().to("meta").requires_grad_(b.requires_grad) for b in module.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo).to("meta")


def seconds(module: nn.Module, x: Tensor, *, input_gradient: bool) -> float:
    """The time of a forward and a backward pass: the shortest of a few runs."""
    module = copy.deepcopy(module).eval()  # so that no gradient is left in the original
    times = []
    for _ in range(TIMED_RUNS):
        begin = time.perf_counter()
        _forward_backward(module, x, input_gradient)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _forward_backward(module: nn.Module, x: Tensor, input_gradient: bool) -> None:
    given = x.detach().clone()
    given.requires_grad_(input_gradient and x.is_floating_point())
    with torch.enable_grad():
        forward = getattr(module, "training_forward", module)  # a head may compute more in training than its output
        out: Any = forward(given * 1 if given.requires_grad else given)
        if out.requires_grad:
            out.backward(torch.ones_like(out))


@contextmanager
def activation_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Inside, forward passes enter the memory that they keep for backward passes, the weights' own left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
