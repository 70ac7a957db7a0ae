"""Words of 2, 4 or 8 bits with a scale for each block."""

from __future__ import annotations

from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec
from thinwire.kernels import Layout


def words(bits: int, block: int) -> Codec:
    """Numbers in ±s·(largest of the block)/s, s = 2^(bits−1) − 1, packed.

    To the nearest with 2 bits: −2, −1, 0 or 1 steps of −⅜ of the largest, sign included (see `kernels.encode`).
    A row of w elements becomes w·bits/8 + 4·w/block bytes. `block` must divide w.

    >>> import torch
    >>> codec = words(bits=4, block=8)
    >>> x = torch.tensor([7.0, -1.0, 0.0, 2.0])
    >>> codec.encode(x, 1, 8, 0, None).shape, codec.decode(codec.encode(x, 1, 8, 0, None), 8, 4).tolist() == x.tolist()
    (torch.Size([1, 8]), True)
    """

    def encode(x: Tensor, num_rows: int, width: int, key: int | None, error: Tensor | None) -> Tensor:
        return kernels.encode(x, num_rows, Layout(width, bits, block), key, error)

    def decode(data: Tensor, width: int, count: int) -> Tensor:
        return kernels.decode(data, Layout(width, bits, block), count)

    def decode_mean(data: Tensor, width: int) -> Tensor:
        return kernels.decode_mean(data[:, None], Layout(width, bits, block), width)

    return Codec(encode, decode, decode_mean)
