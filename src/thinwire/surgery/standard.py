"""Models after surgery as ordinary PyTorch: nothing of thinwire is needed to use or load them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from torch import nn
from torch.nn.utils import parametrize

from thinwire.surgery.attention import UnpackedAttention, pack_attention
from thinwire.surgery.lowrank import Factored, merge


def standard(model: nn.Module, read: Collection[str] = ()) -> nn.Module:
    """Replace what surgery put into a model by torch's own modules. `read` are layers whose weights the model reads.

    A factored layer becomes an nn.Sequential of `down` and `up`. Where the model reads a weight instead of calling the
    layer, as torch's attention does, the weight becomes a parametrization: `original` and the weight of an nn.Linear.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, UnpackedAttention):
            model.set_submodule(name, _attention(module))
        elif isinstance(module, Factored) and name:
            inside = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(inside, nn.MultiheadAttention):
                is_read = name in read or isinstance(inside, nn.TransformerEncoderLayer)  # which does when it is tested
                model.set_submodule(name, _product(module) if is_read else _pair(module))
    return model


def _pair(layer: Factored) -> nn.Sequential:
    return nn.Sequential(OrderedDict(down=layer.down, up=layer.up)).train(layer.training)


def _product(layer: Factored) -> nn.Module:
    """A full layer whose weight is computed from two factors whenever it is read; a convolution is just full."""
    full = merge(layer)
    if isinstance(full, nn.Linear):
        _set_product(full, "weight", layer)
    return full


def _attention(opened: UnpackedAttention) -> nn.MultiheadAttention:
    packed = pack_attention(opened)
    for owner, name, layer in (
        (packed, "in_proj_weight", opened.in_proj),
        (packed.out_proj, "weight", opened.out_proj),
    ):
        if isinstance(layer, Factored):
            _set_product(owner, name, layer)
        else:
            setattr(owner, name, layer.weight)
    return packed


def _set_product(owner: nn.Module, name: str, layer: Factored) -> None:
    """owner.name = up·down, as nn.Linear(up) with the weight downᵀ."""
    down = layer.down.weight.detach().T.contiguous()
    times = nn.Linear(down.shape[1], len(down), bias=False, device="meta")
    times.weight = nn.Parameter(down)
    setattr(owner, name, nn.Parameter(layer.up.weight.detach()))
    parametrize.register_parametrization(owner, name, times, unsafe=True)  # unsafe: the weight has another shape
