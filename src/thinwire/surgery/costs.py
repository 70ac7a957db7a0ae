"""What parts of a model cost: operations, time, and the shapes of what they pass on."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire.errors import UsageError

TIMED_RUNS = 3


@torch.no_grad()
def activations(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """What goes into each module, and what comes out of the last, when they run one after the other in eval mode."""
    seen = [x]
    for module in modules:
        modes = {m: m.training for m in module.modules()}
        out = module.eval()(seen[-1].clone())
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
    """Floating-point operations of a forward and a backward pass, of matrix products, attention and convolutions.

    Counted on shapes alone where the module can run without numbers.

    >>> flops(nn.Linear(8, 4), torch.ones(2, 8), input_gradient=False)  # 2·2·8·4 forward, and as many for the weights
    256
    """
    try:
        return _counted(_without_numbers(module), x.to("meta"), input_gradient, weights)
    except (RuntimeError, NotImplementedError):  # something that needs to see numbers
        return _counted(copy.deepcopy(module), x, input_gradient, weights)


def _counted(twin: nn.Module, x: Tensor, input_gradient: bool, weights: bool) -> int:
    if not weights:
        twin.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        _forward_backward(twin.eval(), x, input_gradient)
    return int(counter.get_total_flops())


def _without_numbers(module: nn.Module) -> nn.Module:
    """A copy on the meta device, for which no weight is copied."""
    shapes: dict[int, Any] = {id(b): b.detach().to("meta").requires_grad_(b.requires_grad) for b in module.buffers()}
    shapes |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, shapes).to("meta")


def seconds(module: nn.Module, x: Tensor, *, input_gradient: bool) -> float:
    """How long a forward and a backward pass take, the shortest of a few."""
    twin = copy.deepcopy(module).eval()  # of which nothing is remembered
    times = []
    for _ in range(TIMED_RUNS):
        begin = time.perf_counter()
        _forward_backward(twin, x, input_gradient)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _forward_backward(module: nn.Module, x: Tensor, input_gradient: bool) -> None:
    given = x.detach().clone()
    given.requires_grad_(input_gradient and x.is_floating_point())
    with torch.enable_grad():
        run = getattr(module, "computed", module)  # a head may compute more in training than its output
        out: Any = run(given * 1 if given.requires_grad else given)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
