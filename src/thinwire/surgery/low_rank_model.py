"""Models with low-rank layers that consist of torch's own modules: find, give and merge such layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.surgery.attention import unpack_attention
from thinwire.surgery.lowrank import Factored, factor_layers, merge
from thinwire.surgery.standard import to_standard_modules


class LowRankLayers(NamedTuple):
    """The low-rank layers of a model; enough to give another model the same ones."""

    layer_ranks: dict[str, int]
    read: list[str]  # those whose weight is a parametrization, because the model reads it


def find_low_rank_layers(model: nn.Module, candidates: Collection[str]) -> LowRankLayers:
    """The low-rank layers of a model; `candidates` are the names of layers that may be some."""
    factors = {name: found for name in candidates if (found := _down(model, name)) is not None}
    read = [name for name in factors if _parametrized(model, name) is not None]
    return LowRankLayers({name: min(down.shape) for name, down in factors.items()}, read)


def give_low_rank_layers(model: nn.Module, layers: LowRankLayers) -> nn.Module:
    """Replace layers of a model by low-rank ones, whose weights are yet to be loaded. In place; returns the model."""
    unpack_attention(model)
    factor_layers(model, layers.layer_ranks)
    return to_standard_modules(model, layers.read)


def merge_low_rank_layers(model: nn.Module, layers: LowRankLayers) -> nn.Module:
    """Make low-rank layers full again: W ← up·down. In place; returns the model.

    >>> thin = give_low_rank_layers(nn.Sequential(nn.Linear(8, 8)), small := LowRankLayers({"0": 2}, []))
    >>> thin
    Sequential(
      (0): Sequential(
        (down): Linear(in_features=8, out_features=2, bias=False)
        (up): Linear(in_features=2, out_features=8, bias=True)
      )
    )
    >>> merge_low_rank_layers(thin, small)
    Sequential(
      (0): Linear(in_features=8, out_features=8, bias=True)
    )
    """
    for name in layers.layer_ranks:
        parametrized = _parametrized(model, name)
        if parametrized is not None:
            _remove_parametrization(*parametrized)
        else:
            thin = model.get_submodule(name)
            model.set_submodule(name, merge(Factored(thin.down, thin.up).train(thin.training)))  # type: ignore[arg-type]
    return model


def _remove_parametrization(module: nn.Module, attribute: str) -> None:
    """Keep what the parametrization computes as an ordinary parameter.

    torch's own function changes the class of the module. Copies of the module have the same class, and would break.
    """
    weight = getattr(module, attribute).detach()
    module.__class__ = type(module).__bases__[0]
    del module.parametrizations
    module._parameters = {attribute: nn.Parameter(weight), **module._parameters}


def _down(model: nn.Module, name: str) -> Tensor | None:
    """The weight of the lower factor of a layer, as a matrix; None if the layer is full."""
    parametrized = _parametrized(model, name)
    if parametrized is not None:
        owner, attribute = parametrized
        return owner.get_parameter(f"parametrizations.{attribute}.0.weight")
    layer = _owner(model, name)[0]
    is_thin = isinstance(layer, nn.Sequential) and hasattr(layer, "down")
    return layer.get_parameter("down.weight").flatten(1) if is_thin else None


def _parametrized(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module and the name of its tensor that a factored layer is parametrized as; None if it is not."""
    owner, attribute = _owner(model, name)
    return (owner, attribute) if parametrize.is_parametrized(owner, attribute) else None


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the weight of a layer, and the weight's name in it."""
    parent, _, layer = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(owner, nn.MultiheadAttention) and layer == "in_proj":
        return owner, "in_proj_weight"
    return model.get_submodule(name), "weight"
