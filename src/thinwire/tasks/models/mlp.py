"""A fully connected network."""

from __future__ import annotations

import itertools
import math

from pydantic import NonNegativeInt, PositiveInt
from torch import nn


def mlp(
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    width: PositiveInt = 256,  # hidden units per layer; more = more bytes per step
    depth: NonNegativeInt = 2,  # hidden layers
    norm: bool = False,  # BatchNorm after each hidden layer
) -> nn.Sequential:
    """Fully connected: `depth` hidden layers of `width` ReLU units.

    >>> sum(p.numel() for p in mlp((1, 8, 8), 10).parameters())
    85002
    """
    sizes = [math.prod(shape)] + [width] * depth
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), *([nn.BatchNorm1d(outputs)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))
