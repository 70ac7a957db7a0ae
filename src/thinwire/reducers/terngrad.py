"""Three values: −1, 0 and 1 times a scale that all ranks share."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from thinwire import kernels
from thinwire.comm.base import Comm
from thinwire.reducers.base import Block, Reducer, ReducerState
from thinwire.reducers.owners import combine_codes
from thinwire.reducers.vectors import Averaged, Randomness, on_vectors


def terngrad(
    clip: Annotated[float, Field(gt=0)] | None = 2.5,  # in standard deviations; lower = less noise, more is clipped
    block: Block = 512,  # elements that share a scale; lower = finer scales, 32/block more bits per element
) -> Reducer:
    """Stochastic rounding to −M, 0 or M; the sum of the rounded values is exact.

    M = maxᵢ min(‖gᵢ‖∞, clip·rms(gᵢ)) for each block, qᵢ = ternary(gᵢ/M), out = M/n·Σqᵢ. Codes of 2 bits go to the
    rank that owns their part; the sum comes back in 4 bits up to 7 ranks, 8 up to 127, else 16 (b). Wire bytes per
    rank: (n−1)/n·P·(2 + b)/8 + 2(n−1)/n·4⌈P/block⌉. Unbiased without `clip`; what is cut off is part of the error.

    Wire: 3 bits per element up to 7 ranks, then 5; does not sum on the wire.

    Wen et al., "TernGrad", NeurIPS 2017.
    """

    def average(x: Tensor, randomness: Randomness, state: ReducerState, comm: Comm) -> Averaged:
        largest = kernels.abs_max(x, block)
        if clip is not None:
            clipped = torch.minimum(largest, clip * _rms(x, largest, block)).nan_to_num(torch.inf)
            largest = kernels.clamp_scales(clipped)
        scales = comm.max(largest)
        scales = torch.where(scales < torch.inf, scales, torch.nan)
        codes = kernels.quantise(x, scales, 1, block, randomness.rounding_key(comm.rank))
        back = 4 if comm.size <= 7 else 8 if comm.size <= 127 else 16
        number = torch.int8 if back <= 8 else torch.int16
        total = combine_codes(codes, 2, lambda rows: rows.sum(0, dtype=number), back, comm)
        mean = kernels.dequantise(total, scales, comm.size, block)
        return Averaged(mean, lambda: kernels.quantisation_error(x, codes, scales, 1, block))

    return on_vectors(average)


def _rms(x: Tensor, largest: Tensor, block: int) -> Tensor:
    """Root mean square of each block, by way of its largest value, so that no square overflows; NaN if not finite."""
    block = min(block, x.numel())
    count = kernels.num_blocks(x.numel(), block)
    rows = torch.nn.functional.pad(x, (0, count * block - x.numel())).view(count, block)
    sizes = torch.full((count,), block, device=x.device)
    sizes[-1] -= count * block - x.numel()
    share = rows / torch.where(largest > 0, largest, 1.0)[:, None]
    return largest * (share.square().sum(1) / sizes).sqrt()
