"""One reducer for matrices, another for vectors."""

from __future__ import annotations

from thinwire.comm.base import Comm
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState, ordered_like
from thinwire.reducers.mean import mean
from thinwire.reducers.states import add_prefix, select_prefix


def partition(
    matrices: Reducer,  # reducer of tensors with two or more dimensions: nearly all elements
    vectors: Reducer = mean(),  # reducer of biases and weights of norms: few elements, large gradients
) -> Reducer:
    """One reducer for matrices, another for vectors (by default the exact mean).

    Wire bytes are those of both. Vectors are a few thousandths of a model, and what suits matrices suits them badly.

    Wire: as `matrices`, and as `vectors` (32 bits by default) for each element of a vector.
    """
    parts = {"matrices": matrices, "vectors": vectors}

    def init(tensors: Named) -> ReducerState:
        state: ReducerState = {}
        for part, some in _split_by_dim(tensors).items():
            state |= add_prefix(parts[part].init(some), part)
        return state

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        outs = {
            part: parts[part].reduce(some, select_prefix(state, part), comm)
            for part, some in _split_by_dim(tensors).items()
        }

        def error() -> Named:
            return ordered_like({name: t for out in outs.values() for name, t in out.error().items()}, tensors)

        means = {name: t for out in outs.values() for name, t in out.mean.items()}
        new_state = {key: t for part, out in outs.items() for key, t in add_prefix(out.state, part).items()}
        return Reduced(ordered_like(means, tensors), error, new_state)

    contracting = None
    if matrices.contracting or vectors.contracting:
        contracting = partition(matrices.contracting or matrices, vectors.contracting or vectors)
    has_phases = matrices.has_phases or vectors.has_phases
    return Reducer(init, reduce, matrices.keeps_errors or vectors.keeps_errors, contracting, has_phases=has_phases)


def _split_by_dim(tensors: Named) -> dict[str, Named]:
    """Matrices and vectors; a part without any is left out."""
    by_part = {
        "matrices": {name: t for name, t in tensors.items() if t.dim() > 1},
        "vectors": {name: t for name, t in tensors.items() if t.dim() <= 1},
    }
    return {part: some for part, some in by_part.items() if some}
