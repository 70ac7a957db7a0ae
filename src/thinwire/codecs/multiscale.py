"""Words with a finer scale for small numbers: a block's scale, or a quarter, a sixteenth … of it."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec
from thinwire.kernels import SCALE_BYTES

STEP_BITS = 2  # each scale is 2^−STEP_BITS of the one before; a power of two, so that changing scale is exact


def multiscale(bits: int, scales: int, block: int) -> Codec:
    """As `words`, and for each number the finest of some scales that it fits in.

    x is sent as x·4^j, with the largest j < scales for which |x| ≤ 4^−j·(largest of the block).
    A row of w elements becomes w·(bits + index bits)/8 + 4·w/block bytes.
    """
    levels = 2 ** (bits - 1) - 1
    index = index_bits(scales)

    def encode(x: Tensor, num_rows: int, width: int, key: int | None, error: Tensor | None) -> Tensor:
        flat = torch.nn.functional.pad(x, (0, num_rows * width - len(x)))
        tops = kernels.abs_max(flat, block)
        finest = finest_scale(flat, tops, scales, block)
        codes = kernels.quantise(magnify(flat, finest), tops, levels, block, key)
        packed = kernels.pack(codes.view(num_rows, -1), bits), kernels.pack(finest.view(num_rows, -1), index)
        data = torch.cat([tops.view(torch.uint8).view(num_rows, -1), *packed], 1)
        if error is not None:
            torch.sub(x, decode(data, width, len(x)), out=error)
        return data

    def decode(data: Tensor, width: int, count: int) -> Tensor:
        sizes = [SCALE_BYTES * (width // block), width * bits // 8, width * index // 8]
        tops, codes, finest = data.split(sizes, 1)
        values = kernels.dequantise(kernels.unpack(codes, bits).reshape(-1), _scales(tops), levels, block)
        return magnify(values, -kernels.unpack(finest, index, signed=False).reshape(-1))[:count]

    def decode_mean(data: Tensor, width: int) -> Tensor:
        total = decode(data[:1], width, width)
        for i in range(1, len(data)):
            total += decode(data[i : i + 1], width, width)
        return total.div_(total.new_full((), len(data)))

    return Codec(encode, decode, decode_mean)


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


def _scales(data: Tensor) -> Tensor:
    """Scales from bytes; those that are not finite as NaN, so that everything they scale is."""
    scales = data.clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)  # aligned
    return torch.where(scales < torch.inf, scales, torch.nan)
