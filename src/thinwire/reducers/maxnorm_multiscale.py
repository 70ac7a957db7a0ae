"""Whole numbers in units of the largest gradient, and finer units for small ones."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.multiscale import finest_that_fits, index_bits, magnified, multiscale
from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.reducers.base import Averaged, Block, Draw, Reducer, State, on_vectors
from thinwire.reducers.maxnorm import BLOCKS, FEWEST_LEVELS, shared_scales, sum_levels
from thinwire.reducers.owners import coded_mean, combined


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

    def average(x: Tensor, draw: Draw, state: State, comm: Comm) -> Averaged:
        levels = sum_levels(comm.size)
        if bits < 8 or levels < FEWEST_LEVELS:
            if bits == 8:
                say(
                    f"maxnorm_multiscale: sums of {comm.size} ranks leave {levels} levels in 8 bits; packing words",
                    comm.rank,
                    once=True,
                )
            return coded_mean(x, lambda even: multiscale(bits, scales, even), block, draw, comm)
        tops = shared_scales(x, block, comm)
        fits = finest_that_fits(x, tops, scales, block)
        finest = combined(fits, index_bits(scales), _smallest, index_bits(scales), comm, signed=False)
        large = magnified(x, finest)
        codes = kernels.quantise(large, tops, levels, block, draw.rounding(comm.rank))
        mean = kernels.dequantise(comm.sum(codes), tops, levels * comm.size, block)
        return Averaged(
            magnified(mean, -finest), lambda: magnified(kernels.quantisation_error(large, codes, tops, levels, block), -finest)
        )

    return on_vectors(average)


def _smallest(indices: Tensor) -> Tensor:
    return torch.amin(indices, 0)
