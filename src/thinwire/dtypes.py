"""Which tensors ranks can average: dense ones of real or complex floating-point numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError

AVERAGED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def is_averaged(tensor: Tensor) -> bool:
    """Whether ranks can take the mean of such tensors; of others (counters, masks) rank 0's are taken."""
    return tensor.dtype in AVERAGED


def as_reals(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, along a last axis, in place; a real one as it is.

    >>> as_reals(torch.tensor([1 + 2j])).tolist(), as_reals(torch.tensor([3.0])).tolist()
    ([[1.0, 2.0]], [3.0])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def refuse_unfit(model: nn.Module, who: str) -> None:
    """Raise UsageError for parameters that cannot be trained on several ranks, before the first step."""
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise UsageError(f"{who}: {name} has no shape yet (a lazy layer); run one batch through the model first")
        if p.requires_grad and (p.dtype not in AVERAGED or p.layout != torch.strided):
            possible = ", ".join(str(dtype).removeprefix("torch.") for dtype in AVERAGED)
            raise UsageError(
                f"{who}: {name} is {p.dtype} and {p.layout}; possible: dense parameters of {possible}; convert it "
                "(model.float()), or set requires_grad=False"
            )
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and isinstance(weight, Tensor) and weight.requires_grad:
            raise UsageError(f"{who}: {name or type(module).__name__} has sparse=True; {SPARSE}")


def refuse_sparse(gradient: Tensor | None, name: str) -> None:
    """Raise UsageError for a gradient that is not dense, which not every model tells beforehand."""
    if gradient is not None and gradient.layout != torch.strided:
        raise UsageError(f"{name} got a gradient that is {gradient.layout}; {SPARSE}")


SPARSE = "possible: dense gradients; use sparse=False, or leave its exchange to plain DDP"
