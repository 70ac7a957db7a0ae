"""Codec: vectors ↔ bytes, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Codec(NamedTuple):
    """A pair of functions on matrices of float32. Each row becomes a row of bytes of its own, to be sent apart.

    `encode(x, key)` rounds at random with numbers that depend on the key, and E[decode(encode(x))] = x; without a key
    it rounds to the nearest. A block with a value that is not finite is decoded as NaN. A row's width is a multiple
    of 8.
    """

    encode: Callable[[Tensor, int | None], Tensor]
    decode: Callable[[Tensor, int], Tensor]  # (bytes, width of a row)


def even_blocks(width: int, block: int) -> int:
    """The largest block, a multiple of 8 and no more than `block`, of which a row of about this width has whole ones.

    >>> even_blocks(1032, 1024), even_blocks(2048, 1024), even_blocks(8, 1024)
    (520, 1024, 8)
    """
    count = max(1, -(-width // block))
    return max(8, -(-width // (8 * count)) * 8)
