"""Exact at first, when gradients are large and change fast."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from thinwire.comm.base import Comm
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState
from thinwire.reducers.mean import mean
from thinwire.reducers.states import add_prefix, select_prefix


def warmup(
    inner: Reducer,  # reducer after the first steps
    steps: Annotated[int, Field(ge=0)] = 100,  # first steps, with the exact mean; higher = more bytes, safer start
) -> Reducer:
    """The exact mean for the first steps, then another reducer.

    Wire bytes per rank: in the first steps 2(n−1)/n · (bytes of the tensors), then those of `inner`.

    Wire: 32 bits per element at first, then as `inner`.
    """

    def init(tensors: Named) -> ReducerState:
        return {"step": torch.zeros((), dtype=torch.int64), **add_prefix(inner.init(tensors), "inner")}

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        step = int(state["step"])
        reduce_now = mean().reduce if step < steps else inner.reduce
        out = reduce_now(tensors, select_prefix(state, "inner"), comm)
        return out._replace(state={"step": torch.tensor(step + 1), **add_prefix(out.state, "inner")})

    contracting = warmup(inner.contracting, steps) if inner.contracting else None
    return Reducer(init, reduce, inner.keeps_errors, contracting, has_phases=True)
