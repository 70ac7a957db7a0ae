"""Reducer: the mean of named tensors over ranks, exact or approximate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from thinwire.comm.base import Comm

Named = dict[str, Tensor]  # by parameter name
State = dict[str, Tensor]  # plain tensors, so that checkpoints need nothing special


class Reduced(NamedTuple):
    """What one reduction gives."""

    mean: Named  # bitwise the same on every rank
    sent: Named  # what this rank contributed, as the others saw it
    state: State


class Reducer(NamedTuple):
    """A pair of functions: `init` makes the state for some tensors, `reduce` averages them.

    `reduce` never changes its inputs, and copies what it wants to keep of them: they are overwritten as soon as it
    returns. It is written as if communication were instant; running it beside the backward pass is the business of
    `thinwire.overlap`.
    """

    init: Callable[[Named], State]
    reduce: Callable[[Named, State, Comm], Reduced]
