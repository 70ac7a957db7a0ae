"""Segments: the smallest pieces into which a model can be cut, to be run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from thinwire.surgery.blocks import resolve_layer_names
from thinwire.surgery.chains import BlockChain, find_chain
from thinwire.surgery.tracing import NotTraceable, has_matrix, trace_segments


class Segment(NamedTuple):
    """A piece of a model that is not cut any further, and the layer that it begins with."""

    name: str
    module: nn.Module


def segments_of(model: nn.Module, cut_at: Sequence[str] = ()) -> list[Segment]:
    """The smallest pieces into which a model can be cut, in the order in which they run: model(x) = s_n(…s_1(x)).

    A segment begins at each layer with a weight matrix, and at the layers named in `cut_at`; layers without one (norms,
    activations, pooling) belong to the segment before them. In a model that is not an nn.Sequential, torch.fx finds the
    layers that the model can be cut at: only one tensor passes there. Where it cannot follow the model's code, or sees
    one call in it, the members of an nn.ModuleList are segments, which `follow` makes ready to run.

    >>> net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    >>> [segment.name for segment in segments_of(net)]
    ['0', '3']
    """
    if type(model) is not nn.Sequential:
        return _segments_of_code(model, cut_at)
    layers = _flatten(model)
    cut_at = resolve_layer_names(cut_at, [name for name, _ in layers[1:]])
    groups: list[tuple[str, list[nn.Module]]] = []
    group_has_matrix = False
    for name, layer in layers:
        if not groups or name in cut_at or (has_matrix(layer) and (group_has_matrix or groups[1:])):
            groups.append((name, []))
            group_has_matrix = False
        group_has_matrix = group_has_matrix or has_matrix(layer)
        groups[-1][1].append(layer)
    return [Segment(name, nn.Sequential(*members)) for name, members in groups]


def _segments_of_code(model: nn.Module, cut_at: Sequence[str]) -> list[Segment]:
    try:
        traced, reason = trace_segments(model, cut_at), None
    except NotTraceable as error:
        traced, reason = [], error
    if len(traced) > 1 or (cut_at and traced):
        return [Segment(name, module) for name, module in traced]
    chain = None if hasattr(model, "_orig_mod") else find_chain(model, cut_at)  # compiled code calls no blocks
    if chain is not None:
        return [Segment(name, NotFollowed(chain)) for name in chain.names]
    if reason is not None:
        raise reason
    return [Segment(name, module) for name, module in traced]


def follow(model: nn.Module, segments: Sequence[Segment], example: Tensor) -> list[Segment]:
    """The segments of a model as modules that can run, for inputs like an example, or else a UsageError."""
    first = segments[0].module
    if not isinstance(first, NotFollowed):
        return list(segments)
    modules = first.chain.follow(model, example)
    return [Segment(segment.name, module) for segment, module in zip(segments, modules, strict=True)]


class NotFollowed(nn.Module):
    """Stands for a segment of a model whose forward must run once before its segments can."""

    def __init__(self, chain: BlockChain) -> None:
        super().__init__()
        self.chain = chain


def _flatten(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of an nn.Sequential, with those of each nn.Sequential inside it that has no hooks."""
    found: list[tuple[str, nn.Module]] = []
    for name, layer in model._modules.items():
        assert layer is not None
        is_plain = type(layer) is nn.Sequential and not layer._forward_hooks and not layer._forward_pre_hooks
        found += _flatten(layer, f"{prefix}{name}.") if is_plain else [(prefix + name, layer)]  # type: ignore[arg-type]
    return found
