"""A few coordinates, the same on every rank."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from thinwire import kernels
from thinwire.comm.base import Comm
from thinwire.errors import UsageError
from thinwire.kernels.hashing import uniform
from thinwire.reducers.base import Reducer, ReducerState
from thinwire.reducers.mean import mean
from thinwire.reducers.states import add_prefix, select_prefix
from thinwire.reducers.vectors import Averaged, Randomness, on_vectors


def global_randk(
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.25,  # share of elements sent; lower = fewer bytes, slower learning
    inner: Reducer = mean(),  # how these coordinates are averaged; maxnorm and maxnorm_multiscale save more
) -> Reducer:
    """Send K random coordinates, the same on every rank; the others are zero in the result.

    The vector is cut into K equal parts and one coordinate of each is drawn from (step, bucket), so no index travels,
    and sums work. What was drawn is multiplied by the size of its part, so that E[out] is the mean. Under
    error_feedback it is not: there the rest is not lost but waits. Wire bytes per rank: those of `inner` for K + 1
    elements, K = max(1, round(ratio·P)); for `mean`, 2(n−1)/n·4(K + 1). The extra element is NaN if
    any input is not finite, even one that is not sent.

    With feedback an element waits 1/ratio steps on average, and then all that it collected comes at once: a ratio of
    0.01 needs a learning rate some ten times lower than the exact mean, and as many more steps.

    Wire: 8 bits per element with the ratio 0.25 (32·ratio; less with a quantised inner); sums on the wire.

    Vineeth S., "Quantization for Distributed Optimization", 2021 (GlobalRandK).
    """

    if inner.keeps_errors:
        raise UsageError(
            "global_randk: coordinates change, so inner must not keep errors; put error_feedback around it"
        )

    def init(x: Tensor) -> ReducerState:
        return add_prefix(inner.init({"chosen": x.new_zeros(num_chosen(x.numel(), ratio) + 1)}), "inner")

    def average(x: Tensor, randomness: Randomness, state: ReducerState, comm: Comm) -> Averaged:
        return _average_chosen(x, ratio, inner, randomness, state, comm)

    return on_vectors(average, init)


def _average_chosen(
    x: Tensor, ratio: float, inner: Reducer, randomness: Randomness, state: ReducerState, comm: Comm
) -> Averaged:
    chosen, sizes = chosen_coordinates(x.numel(), num_chosen(x.numel(), ratio), randomness.key(), x.device)
    weights = sizes if randomness.unbiased else torch.ones_like(sizes)
    reducer = inner if randomness.unbiased else inner.contracting or inner
    alarm = torch.where(kernels.all_finite(x), 0.0, torch.nan).view(1)
    name = f"chosen in {randomness.seed}"  # another one in every bucket and step, for other random numbers
    out = reducer.reduce({name: torch.cat([x[chosen] * weights, alarm])}, select_prefix(state, "inner"), comm)
    values, alarm = out.mean[name].split([len(chosen), 1])
    result = torch.zeros_like(x).index_copy_(0, chosen, values) + alarm * 0

    def error() -> Tensor:
        return x.index_copy(0, chosen, x[chosen] * (1 - weights) + out.error()[name][:-1])

    return Averaged(result, error, add_prefix(out.state, "inner"))


def num_chosen(count: int, ratio: float) -> int:
    """How many of so many elements are sent; at least one.

    >>> num_chosen(1000, 0.01), num_chosen(3, 0.01)
    (10, 1)
    """
    return min(count, max(1, round(ratio * count)))


def chosen_coordinates(count: int, chosen: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One coordinate of each of `chosen` equal parts of a vector, in order, and the size of each part.

    >>> chosen_coordinates(6, 6, 0, torch.device("cpu"))[0].tolist()
    [0, 1, 2, 3, 4, 5]
    """
    bounds = torch.arange(chosen + 1, device=device) * count // chosen
    sizes = bounds.diff()
    return bounds[:-1] + (uniform(chosen, key, device) * sizes).long(), sizes.float()
