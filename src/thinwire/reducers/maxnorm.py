"""Gradients rounded to whole numbers in units of a scale that all ranks share: these can be summed on the wire.

>>> import thinwire, torch
>>> reducer = maxnorm(bits=8)
>>> def train(comm):
...     grads = {"w": torch.tensor([63.0, -21.0]) / (1 + 2 * comm.rank)}
...     return reducer.reduce(grads, reducer.init(grads), comm).mean["w"].tolist()
>>> thinwire.simulate(train, ranks=2)
[[42.0, -14.0], [42.0, -14.0]]
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.words import words
from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.errors import UsageError
from thinwire.reducers.base import Block, Reducer, ReducerState
from thinwire.reducers.owners import coded_mean
from thinwire.reducers.vectors import Averaged, Randomness, on_vectors

MAX_SUM = 127  # of int8
BLOCKS = {8: 512, 4: 256, 2: 64}  # the fewer levels, the more a scale of their own matters to small values
MIN_LEVELS = 7  # with fewer, the sum's 8 bits tell no more than packed words of 4
HEADROOM = 2.0  # predicted scales: over the mean of the ranks' largest
MAX_SCALE = 2.0**126  # twice that is still a float32
MIN_SCALE_RATIO = 2.0**-20  # predicted scales: to the largest one, so that a block that was all zeros can grow again


def maxnorm(
    bits: Literal[2, 4, 8] = 8,  # bits per element; lower = fewer bytes, noisier gradient
    block: Block | None = None,  # elements that share a scale; lower = finer scales, 32/block more bits per element
    predicted: bool = False,  # true = predict scales from the last step: one round trip fewer, large values are clipped
) -> Reducer:
    """Stochastic rounding to integers with a scale that all ranks share (QSGD-MaxNorm).

    With 8 bits: M = maxᵢ‖gᵢ‖∞ for each block, qᵢ = round(s·gᵢ/M), out = M/(s·n)·Σqᵢ, summed as int8 with s = ⌊127/n⌋.
    Wire bytes per rank: 2(n−1)/n·P + 2(n−1)/n·4⌈P/block⌉. When s would be less than 7 (from 19 ranks on), and with
    fewer bits, packed words go to the rank that owns their part, which sends the rounded mean back:
    2(n−1)/n·(P·bits/8 + 4P/block), where each rank's part is padded to a multiple of 8 elements. Unbiased; variance at
    most M²/(4s²)/n per element (packed: that and the same once more for the mean's own scale).

    Under error_feedback it rounds to the nearest; there 2 bits stand for −2, −1, 0 or 1 steps of −⅜ of the value that
    is largest in its block.
    `block` is 512 elements for 8 bits, 256 for 4 and 64 for 2 by default.
    `predicted` takes M from the last step and saves a round trip: see `_predicted_mean`. With 8 bits only.

    Wire: 8 bits per element, or 4, or 2.5; sums on the wire with 8 bits and up to 18 ranks.

    Alistarh et al., "QSGD", NeurIPS 2017; Vineeth S., "Quantization for Distributed Optimization", 2021.
    """
    if predicted and bits < 8:
        raise UsageError(f"maxnorm: predicted=True with bits={bits}; packed words have their own scales; try bits=8")
    block = block or BLOCKS[bits]

    def average(x: Tensor, randomness: Randomness, state: ReducerState, comm: Comm) -> Averaged:
        kept = {key: state[key] for key in ("scales", "saturated") if predicted}
        if not can_sum_codes(bits, comm, "maxnorm"):
            return coded_mean(x, lambda even: words(bits, even), block, randomness, comm)._replace(state=kept)
        if predicted and state["scales"].any():
            return _predicted_mean(x, block, randomness, state, comm)
        return _summed_mean(x, block, randomness, kept, comm)

    return on_vectors(average, lambda x: _no_prediction(x, block) if predicted else {})


def can_sum_codes(bits: int, comm: Comm, name: str) -> bool:
    """Whether 8-bit codes can be summed on the wire; if there are too many ranks, says so with the reducer's name."""
    levels = sum_levels(comm.size)
    if bits == 8 and levels < MIN_LEVELS:
        say(
            f"{name}: sums of {comm.size} ranks leave {levels} levels in 8 bits; sending packed words",
            comm.rank,
            once=True,
        )
    return bits == 8 and levels >= MIN_LEVELS


def sum_levels(ranks: int) -> int:
    """The most levels whose sum over ranks an int8 holds.

    >>> [sum_levels(ranks) for ranks in (2, 4, 8, 16, 32)]
    [63, 31, 15, 7, 3]
    """
    return MAX_SUM // ranks


def shared_scales(x: Tensor, block: int, comm: Comm) -> Tensor:
    """The largest value in each block over all ranks; NaN where a value is not finite."""
    scales = comm.max(kernels.abs_max(x, block))
    return torch.where(scales < torch.inf, scales, torch.nan)


def _summed_mean(x: Tensor, block: int, randomness: Randomness, kept: ReducerState, comm: Comm) -> Averaged:
    """M from all ranks in a round of its own, then one sum of codes."""
    levels = sum_levels(comm.size)
    scales = shared_scales(x, block, comm)
    lost = randomness.new_error(x)
    codes = kernels.quantise(x, scales, levels, block, randomness.rounding_key(comm.rank), lost)
    mean = kernels.dequantise(comm.sum(codes), scales, levels * comm.size, block)
    state = {**kept, "scales": scales.nan_to_num(0.0)} if kept else {}

    def error() -> Tensor:
        return kernels.quantisation_error(x, codes, scales, levels, block) if lost is None else lost

    return Averaged(mean, error, state)


def _no_prediction(x: Tensor, block: int) -> ReducerState:
    """The state before the first step, which cannot predict anything."""
    count = kernels.num_blocks(x.numel(), block)
    return {"scales": x.new_zeros(count), "saturated": torch.zeros((), dtype=torch.int64, device=x.device)}


def _predicted_mean(x: Tensor, block: int, randomness: Randomness, state: ReducerState, comm: Comm) -> Averaged:
    """One round: M is twice the mean of the ranks' largest values in the last step, so no scales are sent.

    What is cut off is counted in the state ("saturated") and is part of the error, so that error_feedback sends it
    later. Cutting off is a bias: without feedback the mean is right only while nothing is cut off. Behind the codes two
    bytes a block are summed: how large it was (in 1/levels of twice the scale), and whether a value was not finite.
    """
    levels = sum_levels(comm.size)
    scales = kernels.clamp_scales(state["scales"].clamp(min=MIN_SCALE_RATIO * state["scales"].max()))
    largest = kernels.abs_max(x, block)
    not_finite = (largest == torch.inf).to(torch.int8)
    size = (largest / (2 * scales) * levels).nan_to_num(0.0).round_().clamp_(0, levels).to(torch.int8)
    codes = kernels.quantise(x, scales, levels, block, randomness.rounding_key(comm.rank))
    received = comm.sum(torch.cat([codes, size, not_finite]))
    total, sizes, num_not_finite = received.split([len(x), len(scales), len(scales)])
    finite = num_not_finite == 0
    used = torch.where(finite, scales, torch.nan)
    prediction = (HEADROOM * kernels.dequantise(sizes, 2 * scales, levels * comm.size, 1)).clamp(max=MAX_SCALE)
    new_state = {
        "scales": torch.where(finite, prediction, scales),
        "saturated": state["saturated"] + _count_beyond(x, scales, largest, block),
    }
    mean = kernels.dequantise(total, used, levels * comm.size, block)
    return Averaged(mean, lambda: kernels.quantisation_error(x, codes, used, levels, block), new_state)


def _count_beyond(x: Tensor, scales: Tensor, largest: Tensor, block: int) -> Tensor:
    """How many values are beyond their block's scale; looks only at blocks whose largest is."""
    (beyond,) = (largest > scales).nonzero(as_tuple=True)
    indices = beyond[:, None] * block + torch.arange(block, device=x.device)
    values = torch.where(indices < len(x), x[indices.clamp(max=len(x) - 1)].abs(), 0.0)
    return (values > scales[beyond, None]).sum()
