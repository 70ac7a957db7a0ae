"""The functions of `eager` through torch.compile: one pass over memory each.

They need a C++ compiler, and some seconds when they are first called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.hashing import DITHER, MULTIPLIER, position_hashes


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return functools.wraps(function)(torch.compile(function, dynamic=True, fullgraph=True))


@_compiled
def abs_max(x: Tensor, out: Tensor) -> None:
    """See eager."""
    out.copy_(x.abs().amax(1))


def quantise_randomly(x: Tensor, inverse: Tensor, hashes: Tensor, levels: int, out: Tensor) -> None:
    """See eager."""
    _quantise_randomly(x, inverse, hashes, position_hashes(x.shape[1], x.device), float(levels), out)


@_compiled
def _quantise_randomly(x: Tensor, inverse: Tensor, hashes: Tensor, positions: Tensor, levels: Any, out: Tensor) -> None:
    dither = ((positions ^ hashes[:, None]) * MULTIPLIER) * DITHER
    out.copy_((dither + x * inverse[:, None]).round().clamp(-levels, levels))


def quantise_nearest(x: Tensor, inverse: Tensor, levels: int, out: Tensor) -> None:
    """See eager."""
    _quantise_nearest(x, inverse, float(levels), out)


@_compiled
def _quantise_nearest(x: Tensor, inverse: Tensor, levels: Any, out: Tensor) -> None:
    out.copy_((x * inverse[:, None]).round().clamp(-levels, levels))


@_compiled
def dequantise(codes: Tensor, step: Tensor, out: Tensor) -> None:
    """See eager."""
    out.copy_(codes * step[:, None])


@_compiled
def quantisation_error(x: Tensor, codes: Tensor, step: Tensor, out: Tensor) -> None:
    """See eager."""
    out.copy_(x - codes * step[:, None])
