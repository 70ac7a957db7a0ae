"""Tensors of a model moved out of it, put back, replaced, or initialized on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from thinwire.common.tensors import named_tensors
from thinwire.errors import UsageError

_MOVED_TO_META: WeakSet[nn.Module] = WeakSet()


@torch.no_grad()
def with_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model in which these tensors, of any shape, replace those with the same names."""
    replaced = {id(old): _like(old, tensors[name]) for name, old in named_tensors(model).items() if name in tensors}
    return copy.deepcopy(model, replaced)  # which takes them for copies that it has made already


def to_meta(model: nn.Module) -> dict[str, Tensor]:
    """Move a model's tensors to the meta device, which keeps only their shapes; returns the tensors."""
    taken = {}
    for name, old in named_tensors(model).items():
        taken[name] = old.detach()
        _replace(model, old, old.detach().to("meta"))
    _MOVED_TO_META.add(model)
    return taken


def structure_of(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device: its modules, with tensors that have only shapes."""
    structure = with_tensors(
        model, {name: torch.empty_like(t, device="meta") for name, t in named_tensors(model).items()}
    )
    _MOVED_TO_META.add(structure)
    return structure


def refuse_moved_to_meta(model: nn.Module) -> None:
    """Raise UsageError for a model whose tensors to_meta took out."""
    if model in _MOVED_TO_META:
        raise UsageError(
            "the tensors of this model were taken out when it was prepared; give a new model, or the one that "
            "consolidate returned"
        )


def placeholders() -> set[int]:
    """The storages of tensors that are on the meta device in place of those that to_meta took out."""
    return {t.untyped_storage()._cdata for model in _MOVED_TO_META for t in named_tensors(model).values()}


def copy_non_persistent_buffers(source: nn.Module, target: nn.Module) -> None:
    """Give a model the buffers of another that are in no state_dict, such as caches, where shapes are equal."""
    persistent = target.state_dict().keys()
    new = {name: b for name, b in source.named_buffers() if name not in persistent}
    for name, old in list(target.named_buffers()):
        if name in new and new[name].shape == old.shape:
            _replace(target, old, new[name])


def initial_tensors(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The tensors that modules on the meta device begin with, by reset_parameters; the model stays on meta."""
    found = {}
    names = {id(t): name for name, t in named_tensors(model).items()}
    for path, module in model.named_modules():
        held = {(d, k): t for d in ("_parameters", "_buffers") for k, t in getattr(module, d).items() if t is not None}
        if not any(t.is_meta for t in held.values()):
            continue
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if reset is None or any(id(t) not in names for t in held.values()):
            raise UsageError(
                f"{path or 'the model'} ({type(module).__name__}) is on the meta device and has no reset_parameters "
                "that initializes it; add one, or make the model on a real device"
            )
        for (attribute, key), tensor in held.items():
            empty = torch.empty_like(tensor, device=device)
            getattr(module, attribute)[key] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        reset()
        for (attribute, key), tensor in held.items():
            found[names[id(tensor)]] = getattr(module, attribute)[key].detach()
            getattr(module, attribute)[key] = tensor
    return found


def _replace(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Put another tensor everywhere that a model holds one; a parameter stays a parameter."""
    replacement = _like(old, new)
    for module in model.modules():
        held: Any
        for held in (module._parameters, module._buffers):
            held.update({key: replacement for key, value in held.items() if value is old})


def _like(old: Tensor, new: Tensor) -> Tensor:
    """Another tensor, as a parameter if the old one is a parameter."""
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
