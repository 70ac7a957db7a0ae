"""The reference: plain torch, block rows in portions that stay in a CPU's cache.

Products and sums are separate operations, each rounded, so that every version can give the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.kernels.hashing import DITHER, MULTIPLIER, columns

CACHED_ELEMENTS = 2**17  # of a portion; half and twice as many are slower on CPUs with 1–2 MB of cache a core


def largest(x: Tensor, out: Tensor) -> None:
    """Largest absolute value of each row."""
    for part in _portions(x):
        torch.amax(x[part].abs(), 1, out=out[part])


def quantise(x: Tensor, inverse: Tensor, keys: Tensor, levels: int, out: Tensor) -> None:
    """x·inverse, rounded up or down at random so that the mean is right, within ±levels."""
    places = columns(x.shape[1], x.device)
    for part in _portions(x):
        dither = torch.bitwise_xor(places, keys[part, None]).mul_(MULTIPLIER) * DITHER
        out[part] = (x[part] * inverse[part, None]).add_(dither).round_().clamp_(-levels, levels)  # no fused addcmul


def nearest(x: Tensor, inverse: Tensor, levels: int, out: Tensor) -> None:
    """x·inverse, rounded to the nearest whole number, within ±levels."""
    for part in _portions(x):
        out[part] = (x[part] * inverse[part, None]).round_().clamp_(-levels, levels)


def dequantise(codes: Tensor, step: Tensor, out: Tensor) -> None:
    """codes·step."""
    for part in _portions(codes):
        torch.mul(codes[part], step[part, None], out=out[part])


def lost(x: Tensor, codes: Tensor, step: Tensor, out: Tensor) -> None:
    """x − codes·step: what error feedback keeps."""
    for part in _portions(x):
        torch.sub(x[part], codes[part] * step[part, None], out=out[part])


def _portions(x: Tensor) -> Iterator[slice]:
    height, width = x.shape
    if x.device.type != "cpu":
        return iter([slice(0, height)])
    portion = max(1, CACHED_ELEMENTS // max(1, width))
    return (slice(i, i + portion) for i in range(0, height, portion))
