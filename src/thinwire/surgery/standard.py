"""Models after surgery with torch's own modules again, so that they can be used and loaded without thinwire."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from torch import nn
from torch.nn.utils import parametrize

from thinwire.surgery.attention import UnpackedAttention, pack_attention
from thinwire.surgery.lowrank import Factored, merge


def to_standard_modules(model: nn.Module, read: Collection[str] = ()) -> nn.Module:
    """Replace the modules that surgery put into a model by torch's own. In place; returns the model.

    A factored layer becomes an nn.Sequential of `down` and `up`. `read` names layers whose weight the model reads
    instead of calling the layer, as nn.MultiheadAttention does: their weight becomes a parametrization, of `original`
    and the weight of an nn.Linear.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, UnpackedAttention):
            model.set_submodule(name, _to_packed_attention(module))
        elif isinstance(module, Factored) and name:
            parent = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(parent, nn.MultiheadAttention):
                is_read = name in read or isinstance(
                    parent, nn.TransformerEncoderLayer
                )  # it reads weights in eval mode
                model.set_submodule(name, _to_parametrized(module) if is_read else _to_sequential(module))
    return model


def _to_sequential(layer: Factored) -> nn.Sequential:
    return nn.Sequential(OrderedDict(down=layer.down, up=layer.up)).train(layer.training)


def _to_parametrized(layer: Factored) -> nn.Module:
    """A full layer whose weight is computed from two factors each time it is read; a convolution is just full."""
    full = merge(layer)
    if isinstance(full, nn.Linear):
        _parametrize_weight(full, "weight", layer)
    return full


def _to_packed_attention(unpacked: UnpackedAttention) -> nn.MultiheadAttention:
    packed = pack_attention(unpacked)
    for owner, name, layer in (
        (packed, "in_proj_weight", unpacked.in_proj),
        (packed.out_proj, "weight", unpacked.out_proj),
    ):
        if isinstance(layer, Factored):
            _parametrize_weight(owner, name, layer)
        else:
            setattr(owner, name, layer.weight)
    return packed


def _parametrize_weight(owner: nn.Module, name: str, layer: Factored) -> None:
    """owner.name = up·down: nn.Linear with the weight downᵀ, applied to up."""
    down = layer.down.weight.detach().T.contiguous()
    times_down = nn.Linear(down.shape[1], len(down), bias=False, device="meta")
    times_down.weight = nn.Parameter(down)
    setattr(owner, name, nn.Parameter(layer.up.weight.detach()))
    parametrize.register_parametrization(owner, name, times_down, unsafe=True)  # unsafe: the weight has another shape
