"""The reference: plain torch on matrices with a scale block per row, in portions that stay in a CPU's cache.

Products and sums are separate operations, each rounded, so that every version can give the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.kernels.hashing import DITHER, MULTIPLIER, position_hashes

CACHED_ELEMENTS = 2**17  # of a portion; half and twice as many are slower on CPUs with 1–2 MB of cache a core


def abs_max(x: Tensor, out: Tensor) -> None:
    """Largest absolute value of each row."""
    for rows in _portions(x):
        torch.amax(x[rows].abs(), 1, out=out[rows])


def quantise_randomly(x: Tensor, inverse: Tensor, hashes: Tensor, levels: int, out: Tensor) -> None:
    """x·inverse, rounded up or down at random so that the mean is right, within ±levels."""
    positions = position_hashes(x.shape[1], x.device)
    for rows in _portions(x):
        dither = torch.bitwise_xor(positions, hashes[rows, None]).mul_(MULTIPLIER) * DITHER
        out[rows] = (x[rows] * inverse[rows, None]).add_(dither).round_().clamp_(-levels, levels)  # no fused addcmul


def quantise_nearest(x: Tensor, inverse: Tensor, levels: int, out: Tensor) -> None:
    """x·inverse, rounded to the nearest whole number, within ±levels."""
    for rows in _portions(x):
        out[rows] = (x[rows] * inverse[rows, None]).round_().clamp_(-levels, levels)


def dequantise(codes: Tensor, step: Tensor, out: Tensor) -> None:
    """codes·step."""
    for rows in _portions(codes):
        torch.mul(codes[rows], step[rows, None], out=out[rows])


def quantisation_error(x: Tensor, codes: Tensor, step: Tensor, out: Tensor) -> None:
    """x − codes·step."""
    for rows in _portions(x):
        torch.sub(x[rows], codes[rows] * step[rows, None], out=out[rows])


def _portions(x: Tensor) -> Iterator[slice]:
    height, width = x.shape
    if x.device.type != "cpu":
        return iter([slice(0, height)])
    portion = max(1, CACHED_ELEMENTS // max(1, width))
    return (slice(i, i + portion) for i in range(0, height, portion))
