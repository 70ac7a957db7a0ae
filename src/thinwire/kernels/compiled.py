"""The same operations through torch.compile: one pass over memory each. Needs a C++ compiler, and seconds at first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.hashing import DITHER, MULTIPLIER, columns


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return functools.wraps(function)(torch.compile(function, dynamic=True, fullgraph=True))


@_compiled
def largest(x: Tensor, out: Tensor) -> None:
    """See eager."""
    out.copy_(x.abs().amax(1))


def quantise(x: Tensor, inverse: Tensor, keys: Tensor, levels: int, out: Tensor) -> None:
    """See eager."""
    _quantise(x, inverse, keys, columns(x.shape[1], x.device), float(levels), out)


@_compiled
def _quantise(x: Tensor, inverse: Tensor, keys: Tensor, places: Tensor, levels: Any, out: Tensor) -> None:
    dither = ((places ^ keys[:, None]) * MULTIPLIER) * DITHER
    out.copy_((dither + x * inverse[:, None]).round().clamp(-levels, levels))


def nearest(x: Tensor, inverse: Tensor, levels: int, out: Tensor) -> None:
    """See eager."""
    _nearest(x, inverse, float(levels), out)


@_compiled
def _nearest(x: Tensor, inverse: Tensor, levels: Any, out: Tensor) -> None:
    out.copy_((x * inverse[:, None]).round().clamp(-levels, levels))


@_compiled
def dequantise(codes: Tensor, step: Tensor, out: Tensor) -> None:
    """See eager."""
    out.copy_(codes * step[:, None])


@_compiled
def lost(x: Tensor, codes: Tensor, step: Tensor, out: Tensor) -> None:
    """See eager."""
    out.copy_(x - codes * step[:, None])
