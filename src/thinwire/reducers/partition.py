"""One reducer for matrices, another for vectors."""

from __future__ import annotations

from thinwire.comm.base import Comm
from thinwire.reducers.base import Named, Reduced, Reducer, State, contracting, in_order, nested, part_of
from thinwire.reducers.mean import mean


def partition(
    matrices: Reducer,  # reducer of tensors with two or more dimensions: nearly all elements
    vectors: Reducer = mean(),  # reducer of biases and weights of norms: few elements, large gradients
) -> Reducer:
    """One reducer for matrices, another for vectors (by default the exact mean).

    Wire bytes are those of both. Vectors are a few thousandths of a model, and badly served by what suits matrices.

    Wire: as `matrices`, and 32 bits for each element of a vector.
    """
    parts = {"matrices": matrices, "vectors": vectors}

    def split(tensors: Named) -> dict[str, Named]:
        apart = {
            "matrices": {name: t for name, t in tensors.items() if t.dim() > 1},
            "vectors": {name: t for name, t in tensors.items() if t.dim() <= 1},
        }
        return {part: some for part, some in apart.items() if some}

    def init(tensors: Named) -> State:
        state: State = {}
        for part, some in split(tensors).items():
            state |= nested(parts[part].init(some), part)
        return state

    def reduce(tensors: Named, state: State, comm: Comm) -> Reduced:
        outs = {part: parts[part].reduce(some, part_of(state, part), comm) for part, some in split(tensors).items()}

        def error() -> Named:
            return in_order({name: t for out in outs.values() for name, t in out.error().items()}, tensors)

        found = {name: t for out in outs.values() for name, t in out.mean.items()}
        kept = {key: t for part, out in outs.items() for key, t in nested(out.state, part).items()}
        return Reduced(in_order(found, tensors), error, kept)

    differ = matrices.contracting or vectors.contracting
    under_feedback = partition(contracting(matrices), contracting(vectors)) if differ else None
    return Reducer(init, reduce, matrices.keeps_errors or vectors.keeps_errors, under_feedback)
