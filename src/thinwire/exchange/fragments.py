"""Fragments: parts of a model's parameters that are exchanged one at a time."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from thinwire.common.dtypes import as_reals
from thinwire.common.packing import similar_groups
from thinwire.errors import UsageError


class Fragment(NamedTuple):
    """Some parameters, and their place in the vector of all."""

    parameters: list[nn.Parameter]
    names: list[str]
    place: slice

    @property
    def x(self) -> list[Tensor]:
        """The parameters as they are now, complex ones as pairs of real numbers."""
        return [as_reals(p.detach()) if p.is_complex() else p for p in self.parameters]


def make_fragments(model: nn.Module, num_fragments: int) -> list[Fragment]:
    """The trainable parameters of a model in order, in fragments of about equal size."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if num_fragments > len(parameters):
        raise UsageError(
            f"fragments={num_fragments}, but the model has {len(parameters)} parameter tensors to share out"
        )
    fragments, begin = [], 0
    for names in similar_groups({name: p.numel() for name, p in parameters.items()}, num_fragments):
        fragment = Fragment([parameters[name] for name in names], names, slice(0))
        end = begin + sum(x.numel() for x in fragment.x)
        fragments.append(fragment._replace(place=slice(begin, end)))
        begin = end
    return fragments
