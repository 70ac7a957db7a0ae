"""Activations and their gradients as bytes, exact or smaller: what stages send to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.words import words
from thinwire.common.tensors import from_bytes, to_bytes
from thinwire.kernels import SCALE_BYTES

Wire = Literal["exact", "bf16", "int8"]
BLOCK = 256  # numbers that share a scale


def pack(z: Tensor, wire: Wire) -> Tensor:
    """A tensor as bytes: as it is, in bfloat16, or as 8-bit words with a scale for each 256 (nearest, no noise).

    Integers, and dtypes that are no larger than this already, stay as they are.

    >>> pack(torch.ones(2, 300), "int8").numel(), pack(torch.ones(2, 300), "bf16").numel()
    (780, 1200)
    """
    if wire == "exact" or not _shrinks(z.dtype, wire):
        return to_bytes(z)
    if wire == "bf16":
        return to_bytes(z.bfloat16())
    flat = z.detach().reshape(-1)
    return words(8, BLOCK).encode(flat.float(), 1, len(flat) + -len(flat) % BLOCK, None, None)[0]


def unpack(data: Tensor, shape: Sequence[int], dtype: torch.dtype, wire: Wire) -> Tensor:
    """The tensor that was packed."""
    if wire == "exact" or not _shrinks(dtype, wire):
        return from_bytes(data, dtype, shape)
    if wire == "bf16":
        return from_bytes(data, torch.bfloat16, shape).to(dtype)
    count = math.prod(shape)
    return words(8, BLOCK).decode(data[None], count + -count % BLOCK, count).to(dtype).reshape(tuple(shape))


def packed_bytes(shape: Sequence[int], dtype: torch.dtype, wire: Wire) -> int:
    """The number of bytes that `pack` makes of such a tensor."""
    count = math.prod(shape)
    if wire == "exact" or not _shrinks(dtype, wire):
        return count * dtype.itemsize
    return 2 * count if wire == "bf16" else -(-count // BLOCK) * (BLOCK + SCALE_BYTES)


def _shrinks(dtype: torch.dtype, wire: Wire) -> bool:
    return dtype.is_floating_point and dtype.itemsize > (2 if wire == "bf16" else 1)
