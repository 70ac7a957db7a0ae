"""Words with a finer scale for small numbers: a block's scale, or a quarter, a sixteenth … of it."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec
from thinwire.codecs.words import SCALE_BYTES, scales_from_bytes, scales_to_bytes

STEP_BITS = 2  # each scale is 2^−STEP_BITS of the one before; a power of two, so that changing scale is exact


def multiscale(bits: int, scales: int, block: int) -> Codec:
    """As `words`, and for each number the finest of some scales that it fits in.

    x is sent as x·4^j, with the largest j < scales for which |x| ≤ 4^−j·(largest of the block).
    A row of w elements becomes w·(bits + index bits)/8 + 4·w/block bytes.
    """
    levels = 2 ** (bits - 1) - 1
    index = index_bits(scales)

    def encode(x: Tensor, key: int | None) -> Tensor:
        flat = x.reshape(-1)
        tops = kernels.abs_max(flat, block)
        finest = finest_scale(flat, tops, scales, block)
        codes = kernels.quantise(magnify(flat, finest), tops, levels, block, key)
        packed = kernels.pack(codes.view(x.shape), bits), kernels.pack(finest.view(x.shape), index)
        return torch.cat([scales_to_bytes(tops, len(x)), *packed], 1)

    def decode(data: Tensor, width: int) -> Tensor:
        sizes = [SCALE_BYTES * (width // block), width * bits // 8, width * index // 8]
        tops, codes, finest = data.split(sizes, 1)
        values = kernels.dequantise(kernels.unpack(codes, bits).reshape(-1), scales_from_bytes(tops), levels, block)
        return magnify(values, -kernels.unpack(finest, index, signed=False).reshape(-1)).view(-1, width)

    return Codec(encode, decode)


def index_bits(scales: int) -> int:
    """Bits that tell which of so many scales.

    >>> [index_bits(scales) for scales in (2, 3, 4)]
    [1, 2, 2]
    """
    return (scales - 1).bit_length()


def finest_scale(x: Tensor, tops: Tensor, scales: int, block: int) -> Tensor:
    """For each number, the largest j < scales with |x| ≤ 4^−j·(top of its block). Looks at x, not at what it is rounded
    to, which would make the choice depend on the rounding and the mean wrong."""
    top = tops.repeat_interleave(min(block, x.numel()))[: x.numel()]
    size = x.abs()
    fits = [size <= top * 2.0 ** (-STEP_BITS * j) for j in range(1, scales)]
    return torch.stack(fits).sum(0, dtype=torch.int8)


def magnify(x: Tensor, finest: Tensor) -> Tensor:
    """x·4^finest."""
    return torch.ldexp(x, finest.to(torch.int32) * STEP_BITS)
