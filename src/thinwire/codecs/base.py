"""Codec: vectors ↔ bytes, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Codec(NamedTuple):
    """Functions on vectors of float32, which are cut into rows of equal width, a multiple of 8, filled up with zeros.

    `encode` makes a row of bytes of each row, to be sent apart. It rounds at random with numbers that depend on the
    key, and E[decode(encode(x))] = x; without a key it rounds to the nearest. `error`, if given, becomes x − decode(…).
    `decode` gives the vector back, `decode_mean` the mean of such rows as one row, added up in their order. A block
    with a value that is not finite is decoded as NaN.
    """

    encode: Callable[[Tensor, int, int, int | None, Tensor | None], Tensor]  # (x, number of rows, width, key, error)
    decode: Callable[[Tensor, int, int], Tensor]  # (rows of bytes, width, number of elements)
    decode_mean: Callable[[Tensor, int], Tensor]  # (rows of bytes, width)


def even_blocks(width: int, block: int) -> int:
    """The largest block, a multiple of 8 and no more than `block`, of which a row of about this width has whole ones.

    >>> even_blocks(1032, 1024), even_blocks(2048, 1024), even_blocks(8, 1024)
    (520, 1024, 8)
    """
    count = max(1, -(-width // block))
    return max(8, -(-width // (8 * count)) * 8)
