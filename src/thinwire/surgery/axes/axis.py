"""Axis: hidden units, channels or heads of a network, and the tensors that have a part for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

UnitDim = int | tuple[int, int]  # a dimension made of units, or (dimension, how often all units repeat along it)


@dataclass(frozen=True)
class Axis:
    """Units that can be divided among ranks: `size` equal ones, which the tensors that use them sum over.

    `made_by` names the tensors that compute the units and `used_by` those that take them as input, each with the
    dimension that is made of the units; (0, 3) is dimension 0 with all units three times in a row, as for queries, keys
    and values. `counts` are attributes that hold a number of units, and how many for each unit. `normed` says that a
    norm follows, so that the size of the sum does not matter. A module declares its own axes as `thinwire_axes`:

    >>> from torch import nn
    >>> from thinwire.surgery.axes.find import axes_of
    >>> class Gated(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(8, 2 * 32), nn.Linear(32, 8)
    ...         self.thinwire_axes = [Axis(32, {"up.weight": (0, 2), "up.bias": (0, 2)}, {"down.weight": 1})]
    ...     def forward(self, x):
    ...         return self.down(nn.functional.glu(self.up(x)))
    >>> sorted(axes_of(nn.Sequential(Gated(), nn.ReLU()))[0].made_by)
    ['0.up.bias', '0.up.weight']
    """

    size: int
    made_by: Mapping[str, UnitDim]
    used_by: Mapping[str, UnitDim]
    counts: Mapping[str, int] = field(default_factory=dict)
    normed: bool = False

    def with_prefix(self, path: str) -> Axis:
        """The same axis, as the model that has this axis' module at a path names its tensors."""
        made_by, used_by = (
            {join_names(path, name): dim for name, dim in tensors.items()} for tensors in (self.made_by, self.used_by)
        )
        counts = {join_names(path, name): number for name, number in self.counts.items()}
        return replace(self, made_by=made_by, used_by=used_by, counts=counts)

    def unit_dims(self) -> Iterator[tuple[str, int, int]]:
        """Each tensor that has a part for each unit, its dimension, and how often all units repeat along it."""
        for name, dim in (*self.made_by.items(), *self.used_by.items()):
            yield (name, dim, 1) if isinstance(dim, int) else (name, *dim)


def join_names(path: str, name: str) -> str:
    """A module's name inside the module at a path; either may be empty.

    >>> join_names("layers.0", "weight"), join_names("", "weight")
    ('layers.0.weight', 'weight')
    """
    return f"{path}.{name}" if path and name else path or name
