"""Which tensors ranks can average: dense ones of real or complex floating-point numbers."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError

AVERAGED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
DENSE = "possible: dense gradients; make the layer, or call the function, with sparse=False"  # end of a message


def is_averaged(tensor: Tensor) -> bool:
    """Whether ranks can take the mean of such tensors. Of others (counters, masks), rank 0's are used."""
    return tensor.dtype in AVERAGED


def as_reals(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as pairs of real numbers, in a further last dimension; a real tensor as it is.

    >>> as_reals(torch.tensor([1 + 2j])).tolist(), as_reals(torch.tensor([3.0])).tolist()
    ([[1.0, 2.0]], [3.0])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def bfloat16_autocast(device: torch.device, enabled: bool) -> torch.autocast:
    """torch's autocast to bfloat16 for a device. It knows no meta device, on which results have the CPU's types."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, torch.bfloat16, enabled=enabled)


def refuse_unfit(model: nn.Module, who: str, ignored: Container[str] = ()) -> None:
    """Raise UsageError if a parameter cannot be trained on several ranks; `who` begins the message."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in ignored}
    for name, p in trained.items():
        if nn.parameter.is_lazy(p):
            raise UsageError(f"{who}: {name} has no shape yet (a lazy layer); run one batch through the model first")
        if not is_averaged(p) or p.layout != torch.strided:
            possible = ", ".join(str(dtype).removeprefix("torch.") for dtype in AVERAGED)
            raise UsageError(
                f"{who}: {name} is {p.dtype}, {p.layout}; possible: dense parameters of {possible}; convert it, as "
                "model.float() does, or set requires_grad=False"
            )
    for path, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and any(module.weight is t for t in trained.values()):
            raise UsageError(f"{who}: {path or 'the model'} ({type(module).__name__}) has sparse=True; {DENSE}")


def refuse_meta(model: nn.Module) -> None:
    """Raise UsageError if a tensor of the model is on the meta device, where every rank needs all values."""
    if empty := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]:
        raise UsageError(
            f"{empty[0]} is on the meta device and has no values; make the model on a real device, or use ist, which "
            "gives such a model its first values itself"
        )


def refuse_sparse(gradient: Tensor | None, name: str) -> None:
    """Raise UsageError if a gradient is sparse, which cannot be seen in every model before the first step."""
    if gradient is not None and gradient.layout != torch.strided:
        raise UsageError(f"{name} got a gradient that is {gradient.layout}; {DENSE}")
