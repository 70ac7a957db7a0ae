"""Hollow models: their tensors taken out, put in again, or made by those that never had any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from thinwire.common.tensors import named_tensors
from thinwire.errors import UsageError


@torch.no_grad()
def with_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model with other tensors, of any shape, in place of those with these names."""
    made = copy.deepcopy(model)
    for name, old in named_tensors(made).items():
        if name in tensors:
            new = tensors[name]
            replacement = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            for put in _slots(made, old):
                put(replacement)
    return made


def to_meta(model: nn.Module) -> dict[str, Tensor]:
    """Take the tensors out of a model, which keeps their shapes alone; returns them."""
    taken = {}
    for name, old in named_tensors(model).items():
        taken[name] = old.detach()
        empty = old.detach().to("meta")
        replacement = nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty
        for put in _slots(model, old):
            put(replacement)
    _EMPTIED.add(model)
    return taken


def keep_caches(trained: nn.Module, model: nn.Module) -> None:
    """Give a model those buffers of a trained narrow one that are no part of its state, where shapes are the same."""
    kept = model.state_dict().keys()
    new = {name: b for name, b in trained.named_buffers() if name not in kept}
    for name, old in list(model.named_buffers()):
        if name in new and new[name].shape == old.shape:
            for put in _slots(model, old):
                put(new[name])


def refuse_moved_to_meta(model: nn.Module) -> None:
    """Raise UsageError for a model whose tensors were taken out."""
    if model in _EMPTIED:
        raise UsageError("this model was emptied when it was prepared; give a new one, or what consolidate returned")


_EMPTIED: WeakSet[nn.Module] = WeakSet()


def initialised(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """What modules on the meta device would begin with; they stay empty."""
    found = {}
    names = {id(t): name for name, t in named_tensors(model).items()}
    for path, module in model.named_modules():
        held = {(d, k): t for d in ("_parameters", "_buffers") for k, t in getattr(module, d).items() if t is not None}
        if not any(t.is_meta for t in held.values()):
            continue
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if reset is None or any(id(t) not in names for t in held.values()):
            raise UsageError(
                f"{path or 'the model'} ({type(module).__name__}) is on the meta device and has no reset_parameters to "
                "begin with; give it one, or make the model on a real device"
            )
        for (holder, key), tensor in held.items():
            empty = torch.empty_like(tensor, device=device)
            getattr(module, holder)[key] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        reset()
        for (holder, key), tensor in held.items():
            found[names[id(tensor)]] = getattr(module, holder)[key].detach()
            getattr(module, holder)[key] = tensor
    return found


def _slots(model: nn.Module, tensor: Tensor) -> list[Callable[[Any], None]]:
    """Functions that put something else everywhere that a model holds a tensor."""
    return [
        partial(held.__setitem__, key)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, value in held.items()
        if value is tensor
    ]
