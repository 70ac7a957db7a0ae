"""The exact mean."""

from __future__ import annotations

import torch

from thinwire.comm.base import Comm
from thinwire.common.tensors import as_vector, flatten, unflatten
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState, ordered_like, zero_error


def mean() -> Reducer:
    """Exact mean: every rank's tensors in full precision, in one all-reduce.

    out = (1/n)·Σᵢ gᵢ.  Wire bytes per rank: 2(n−1)/n · (bytes of the tensors).

    Wire: 32 bits per element (for float32); sums on the wire.

    >>> import thinwire, torch
    >>> def train(comm):
    ...     out = mean().reduce({"w": torch.full((2,), float(comm.rank))}, {}, comm)
    ...     return out.mean["w"].tolist()
    >>> thinwire.simulate(train, ranks=2)
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def init(tensors: Named) -> ReducerState:
        return {}

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        out: Named = {}
        for same in _by_dtype(tensors):
            flat = comm.mean(flatten(same.values()), overwrite=True)
            out |= zip(same, unflatten(flat, same.values()), strict=True)
        return Reduced(ordered_like(out, tensors), zero_error(tensors), state)

    def in_place(tensors: Named, comm: Comm) -> None:
        for same in _by_dtype(tensors):
            given = list(same.values())
            flat = comm.mean(as_vector(given), overwrite=True)
            if flat.data_ptr() != given[0].data_ptr():  # else the result is where it should be
                torch._foreach_copy_(given, unflatten(flat, given))

    return Reducer(init, reduce, in_place=in_place)


def _by_dtype(tensors: Named) -> list[Named]:
    """Tensors that can be sent together."""
    dtypes = dict.fromkeys(t.dtype for t in tensors.values())
    return [{name: t for name, t in tensors.items() if t.dtype == dtype} for dtype in dtypes]
