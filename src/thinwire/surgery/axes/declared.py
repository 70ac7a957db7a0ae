"""Axes that modules declare as `thinwire_axes`, and those that are known of torch's and transformers' modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from thinwire.errors import UsageError
from thinwire.surgery.attention import UnpackedAttention
from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.huggingface import known_axes
from thinwire.surgery.lowrank import count_parameter_uses


def declared_axes(model: nn.Module) -> Iterator[Axis]:
    """The axes that the modules of a model declare, or that are known of torch's and transformers' modules."""
    num_uses = count_parameter_uses(model)
    for name, module in model.named_modules():
        own: Iterable[Axis] = getattr(module, "thinwire_axes", ())
        if not isinstance(own, list | tuple) or not all(isinstance(axis, Axis) for axis in own):
            raise UsageError(f"thinwire_axes of {name or 'the model'} is {own!r}; give a list of tw.Axis")
        if isinstance(module, UnpackedAttention):
            own = [_attention_heads(module)]
        elif type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer) and not own:
            own = [_feed_forward_units(module)]
        elif not own and all(num_uses[id(p)] == 1 for p in module.parameters()):
            own = known_axes(module)
        yield from (axis.with_prefix(name) for axis in own)


def _attention_heads(attention: UnpackedAttention) -> Axis:
    """The heads of nn.MultiheadAttention, whose queries, keys and values are packed into one projection."""
    made_by = {f"in_proj.{name}": (0, 3) for name, _ in attention.in_proj.named_parameters()}
    return Axis(attention.num_heads, made_by, {"out_proj.weight": 1}, {"num_heads": 1})


def _feed_forward_units(layer: nn.Module) -> Axis:
    """The hidden units of torch's transformer layers."""
    inner = layer.get_submodule("linear1")
    made_by = {f"linear1.{name}": 0 for name, _ in inner.named_parameters()}
    return Axis(len(inner.get_parameter("weight")), made_by, {"linear2.weight": 1})


def check_declared(model: nn.Module, axis: Axis) -> None:
    """Raise UsageError if an axis names a tensor that the model does not have, or that does not fit its size."""
    for name, dim, repeats in axis.unit_dims():
        try:
            tensor = (model.get_parameter if name in dict(model.named_parameters()) else model.get_buffer)(name)
        except AttributeError:
            raise UsageError(f"thinwire_axes: the model has no tensor {name}") from None
        if dim >= tensor.dim() or tensor.shape[dim] % (repeats * axis.size):
            raise UsageError(
                f"thinwire_axes: {name} is {'×'.join(map(str, tensor.shape))}, so its dimension {dim} is not made up "
                f"of {f'{repeats} times ' if repeats > 1 else ''}{axis.size} units"
            )
