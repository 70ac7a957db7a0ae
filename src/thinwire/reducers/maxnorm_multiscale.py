"""Whole numbers in units of the largest gradient, and finer units for small ones."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.multiscale import finest_scale, index_bits, magnify, multiscale
from thinwire.comm.base import Comm
from thinwire.reducers.base import Block, Reducer, ReducerState
from thinwire.reducers.maxnorm import BLOCKS, can_sum_codes, shared_scales, sum_levels
from thinwire.reducers.owners import coded_mean, combine_codes
from thinwire.reducers.vectors import Averaged, Randomness, on_vectors


def maxnorm_multiscale(
    bits: Literal[2, 4, 8] = 8,  # bits per element; lower = fewer bytes, noisier gradient
    scales: Annotated[int, Field(ge=2, le=4)] = 2,  # number of scales; more = finer for small values, 1 or 2 more bits
    block: Block | None = None,  # elements that share a scale; lower = finer scales, 32/block more bits per element
) -> Reducer:
    """As maxnorm, with steps 4 (or 16, or 64) times as fine where the values of all ranks are small.

    With 8 bits: each element uses the finest scale j in which every rank's value fits, |gᵢ| ≤ 4⁻ʲM, agreed as the MIN
    over ranks; qᵢ = round(s·4ʲ·gᵢ/M), out = M/(s·n·4ʲ)·Σqᵢ. The choice looks at values, not at what they are rounded
    to, or the mean would be wrong. Wire bytes per rank: those of maxnorm, and 2(n−1)/n·P·b/8 for the choice, b = 1
    bit for 2 scales, else 2. From 19 ranks on, and with fewer bits, packed words that carry their own choice.
    Unbiased.

    Wire: 9 bits per element with 2 scales; sums on the wire with 8 bits and up to 18 ranks, except for the choice.

    Vineeth S., "Quantization for Distributed Optimization", 2021.
    """
    block = block or BLOCKS[bits]

    def average(x: Tensor, randomness: Randomness, state: ReducerState, comm: Comm) -> Averaged:
        if not can_sum_codes(bits, comm, "maxnorm_multiscale"):
            return coded_mean(x, lambda even: multiscale(bits, scales, even), block, randomness, comm)
        return _summed_mean(x, scales, block, randomness, comm)

    return on_vectors(average)


def _summed_mean(x: Tensor, num_scales: int, block: int, randomness: Randomness, comm: Comm) -> Averaged:
    levels = sum_levels(comm.size)
    tops = shared_scales(x, block, comm)  # M of each block
    fits = finest_scale(x, tops, num_scales, block)
    bits = index_bits(num_scales)
    finest = combine_codes(fits, bits, lambda indices: indices.amin(0), bits, comm, signed=False)  # j of each element
    magnified = magnify(x, finest)  # 4ʲ·gᵢ
    codes = kernels.quantise(magnified, tops, levels, block, randomness.rounding_key(comm.rank))
    mean = kernels.dequantise(comm.sum(codes), tops, levels * comm.size, block)

    def error() -> Tensor:
        return magnify(kernels.quantisation_error(magnified, codes, tops, levels, block), -finest)

    return Averaged(magnify(mean, -finest), error)
