"""Reducer: the mean of named tensors over ranks, exact or approximate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.common.dtypes import as_reals

Named = dict[str, Tensor]  # by parameter name
Block = Annotated[int, Field(ge=8, multiple_of=8)]  # elements that share a scale
ReducerState = dict[str, Tensor]  # plain tensors, so that checkpoints need nothing special; the names never change


class Reduced(NamedTuple):
    """What one reduction gives."""

    mean: Named  # bitwise the same on every rank
    error: Callable[[], Named]  # float32: this rank's input less the part of it in the mean; call it at once
    state: ReducerState


class Reducer(NamedTuple):
    """A pair of functions: `init` makes the state for some tensors, `reduce` averages them.

    Gradients are reduced in buckets: a few parameters, last layer first, because their gradients are ready first.
    `init` is called once for each bucket, with its parameters, and `reduce` once for each bucket in every step, with
    its gradients and its own state. So a reducer never sees the whole model at once, unless that fits into one bucket.

    `reduce` never changes its inputs, and copies what it wants to keep of them: they are overwritten as soon as it
    returns. It is written as if communication were instant: `thinwire.exchange.overlapped` runs it during the backward
    pass. The mean over ranks of (given − error) is the mean that it returns.

    `contracting` is the form for use under error feedback, whose error is smaller than what it was given; None if that
    is the reducer itself. Without feedback the result must be unbiased. With feedback the error must be smaller than
    the input, or it grows from step to step: so numbers are rounded to the nearest level, and nothing is magnified.
    """

    init: Callable[[Named], ReducerState]
    reduce: Callable[[Named, ReducerState, Comm], Reduced]
    keeps_errors: bool = False  # and adds them to what is given next, so nothing around it must do that too
    contracting: Reducer | None = None
    in_place: Callable[[Named, Comm], None] | None = None  # if it is exact: writes the mean over the tensors
    has_phases: bool = False  # whether it sends other amounts in later steps


def on_reals(reducer: Reducer) -> Reducer:
    """A reducer that takes complex tensors too: the one given sees each as pairs of real numbers."""

    def as_given(out: Named, tensors: Named) -> Named:
        return {n: torch.view_as_complex(t.clone()) if tensors[n].is_complex() else t for n, t in out.items()}

    def init(tensors: Named) -> ReducerState:
        return reducer.init({name: as_reals(t.detach()) for name, t in tensors.items()})

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        out = reducer.reduce({name: as_reals(t.detach()) for name, t in tensors.items()}, state, comm)
        return out._replace(mean=as_given(out.mean, tensors), error=lambda: as_given(out.error(), tensors))

    def in_place(tensors: Named, comm: Comm) -> None:
        assert reducer.in_place is not None
        reducer.in_place({name: as_reals(t.detach()) for name, t in tensors.items()}, comm)

    contracting = on_reals(reducer.contracting) if reducer.contracting else None
    exact = in_place if reducer.in_place else None
    return Reducer(init, reduce, reducer.keeps_errors, contracting, exact, reducer.has_phases)


def ordered_like(tensors: Named, like: Named) -> Named:
    """The same tensors in another's order."""
    return {name: tensors[name] for name in like}


def zero_error(tensors: Named) -> Callable[[], Named]:
    """The error of an exact reducer."""
    return lambda: {name: torch.zeros_like(t, dtype=torch.float32) for name, t in tensors.items()}
