"""Fragments: parts of a model's parameters that are exchanged one at a time; a large one in several buckets."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from thinwire.common.dtypes import as_reals
from thinwire.common.packing import fill_groups, similar_groups
from thinwire.common.tensors import local_part
from thinwire.errors import UsageError

BUCKET_ELEMENTS = 2**21  # or more: 8 MiB of float32, which take far longer to send than the ranks to meet
MAX_BUCKETS = 8  # of a fragment: each costs its own round trips


class Bucket(NamedTuple):
    """Some parameters that are reduced together, and their place in the vector of all."""

    number: int  # among the buckets of all fragments
    parameters: list[nn.Parameter]
    names: list[str]
    place: slice

    @property
    def x(self) -> list[Tensor]:
        """This rank's parameters as they are now, or its parts of them; complex ones as pairs of real numbers."""
        parts = [local_part(p) for p in self.parameters]
        return [as_reals(part.detach()) if part.is_complex() else part for part in parts]


class Fragment(NamedTuple):
    """The buckets of a fragment, in order. They follow from the model and the number of fragments alone."""

    buckets: list[Bucket]

    @property
    def place(self) -> slice:
        """Of all its parameters, in the vector of all."""
        return slice(self.buckets[0].place.start, self.buckets[-1].place.stop)


def make_fragments(model: nn.Module, num_fragments: int) -> list[Fragment]:
    """The trainable parameters of a model in order, in fragments of about equal size; of sharded ones this rank's part.

    Sharded parameters of which this rank has no part are left out.
    """
    parameters = {
        n: p for n, p in model.named_parameters() if p.requires_grad and (local_part(p).numel() or not p.numel())
    }
    if num_fragments > len(parameters):
        raise UsageError(
            f"fragments={num_fragments}, but the model has {len(parameters)} parameter tensors to share out"
        )
    sizes = {name: local_part(p).numel() for name, p in parameters.items()}
    fragments, number, begin = [], 0, 0
    for names_in_fragment in similar_groups(sizes, num_fragments):
        fragment = Fragment([])
        size = sum(sizes[name] for name in names_in_fragment)
        capacity = max(BUCKET_ELEMENTS, size / MAX_BUCKETS)
        for names in fill_groups({name: sizes[name] for name in names_in_fragment}, capacity):
            bucket = Bucket(number, [parameters[name] for name in names], names, slice(0))
            end = begin + sum(x.numel() for x in bucket.x)
            fragment.buckets.append(bucket._replace(place=slice(begin, end)))
            number, begin = number + 1, end
        fragments.append(fragment)
    return fragments
