"""Words of 2, 4 or 8 bits with a scale for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec

SCALE_BYTES = 4


def words(bits: int, block: int) -> Codec:
    """Numbers in ±s·(largest of the block)/s, s = 2^(bits−1) − 1, packed.

    A row of w elements becomes w·bits/8 + 4·w/block bytes. `block` must divide w.

    >>> codec = words(bits=4, block=8)
    >>> x = torch.tensor([[7.0, -1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    >>> codec.encode(x, 0).shape, codec.decode(codec.encode(x, 0), 8).tolist() == x.tolist()
    (torch.Size([1, 8]), True)
    """
    levels = 2 ** (bits - 1) - 1

    def encode(x: Tensor, key: int | None) -> Tensor:
        flat = x.reshape(-1)
        scales = kernels.abs_max(flat, block)
        codes = kernels.quantise(flat, scales, levels, block, key)
        return torch.cat([scales_to_bytes(scales, len(x)), kernels.pack(codes.view(x.shape), bits)], 1)

    def decode(data: Tensor, width: int) -> Tensor:
        scales, packed = data.split([SCALE_BYTES * (width // block), width * bits // 8], 1)
        codes = kernels.unpack(packed, bits).reshape(-1)
        return kernels.dequantise(codes, scales_from_bytes(scales), levels, block).view(-1, width)

    return Codec(encode, decode)


def scales_to_bytes(scales: Tensor, num_rows: int) -> Tensor:
    """One row of bytes for the scales of each row."""
    return scales.view(torch.uint8).view(num_rows, -1)


def scales_from_bytes(data: Tensor) -> Tensor:
    """Scales again; those that are not finite as NaN, so that everything they scale is."""
    scales = data.clone(memory_format=torch.contiguous_format).view(-1).view(torch.float32)  # aligned
    return torch.where(scales < torch.inf, scales, torch.nan)
