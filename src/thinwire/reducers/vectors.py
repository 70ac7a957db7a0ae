"""Reducers of one vector: a bucket's tensors, flattened."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.base import Comm
from thinwire.common.tensors import as_vector, flatten, unflatten
from thinwire.data import derive_seed
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState, zero_error


class Averaged(NamedTuple):
    """What averaging one vector gives."""

    mean: Tensor
    error: Callable[[], Tensor]
    state: ReducerState | None = None


class Randomness(NamedTuple):
    """Keys of random numbers: different in every step and bucket, and the same on every rank."""

    seed: int
    unbiased: bool = True

    def key(self, *who: int) -> int:
        """32 bits for one use: by a rank, or by all ranks alike when none is given."""
        return derive_seed(self.seed, *who) & 0xFFFFFFFF

    def rounding_key(self, *who: int) -> int | None:
        """The key for rounding at random, or None for rounding to the nearest."""
        return self.key(*who) if self.unbiased else None

    def new_error(self, x: Tensor) -> Tensor | None:
        """Memory for the error of x under error feedback, which needs it in any case; else None."""
        return None if self.unbiased else torch.empty_like(x)


Average = Callable[[Tensor, Randomness, ReducerState, Comm], Averaged]  # must not change the vector


def on_vectors(average: Average, init: Callable[[Tensor], ReducerState] = lambda x: {}) -> Reducer:
    """A reducer from a function of one vector: all tensors flattened, in float32.

    The only state of most is how many steps there were, because random numbers depend on it.
    """
    return _on_vectors(average, init, unbiased=True)._replace(contracting=_on_vectors(average, init, unbiased=False))


def _on_vectors(average: Average, init: Callable[[Tensor], ReducerState], unbiased: bool) -> Reducer:

    def init_all(tensors: Named) -> ReducerState:
        kernels.check_choice()
        return {"step": torch.zeros((), dtype=torch.int64), **init(flatten(tensors.values(), torch.float32))}

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        x = as_vector(tensors.values(), torch.float32)
        if not x.numel():
            return Reduced({name: t.detach().clone() for name, t in tensors.items()}, zero_error(tensors), state)
        step = int(state["step"])
        randomness = Randomness(derive_seed(zlib.crc32("\n".join(tensors).encode()), step), unbiased)
        out = average(x, randomness, state, comm)
        return Reduced(
            _in_their_types(out.mean, tensors),
            lambda: {name: t.float() for name, t in _named(out.error(), tensors).items()},
            {"step": torch.tensor(step + 1), **(out.state or {})},
        )

    return Reducer(init_all, reduce)


def _in_their_types(mean: Tensor, like: Named) -> Named:
    dtypes = {t.dtype for t in like.values()}
    if len(dtypes) == 1:
        return _named(mean.to(dtypes.pop()), like)
    return {name: t.to(like[name].dtype) for name, t in _named(mean, like).items()}


def _named(flat: Tensor, like: Named) -> Named:
    return dict(zip(like, unflatten(flat, like.values()), strict=True))
