"""Quantise and dequantise vectors, block by block: a vector's whole blocks as a matrix, and the last, short one.

The work on the matrices is done by one of the versions: see dispatch.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.common.dtypes import as_reals
from thinwire.kernels.dispatch import call_kernel
from thinwire.kernels.hashing import block_hashes

MIN_SCALE = 127 * 2.0**-126  # a 127th of it, the finest step there is, is the smallest number of full precision


def abs_max(x: Tensor, block: int) -> Tensor:
    """Largest absolute value of each block, clamped as `clamp_scales` does; inf where a value is not finite.

    >>> abs_max(torch.tensor([1.0, -3.0, 2.0]), block=2)
    tensor([3., 2.])
    """
    out = torch.empty(num_blocks(x.numel(), block), device=x.device)
    for rows, values in _as_matrices(block, x):
        call_kernel("abs_max", values, out=out[rows])
    return clamp_scales(torch.where(out < torch.inf, out, torch.inf))


def clamp_scales(scales: Tensor) -> Tensor:
    """Scales that can be divided by: those above zero are at least MIN_SCALE, 1.5·10⁻³⁶.

    Smaller ones have no reciprocal in float32. Values below that, denormal numbers included, are rounded to steps of
    2⁻¹²⁶ or more: at random, so right on average, or to the nearest, and error feedback keeps the rest.

    >>> clamp_scales(torch.tensor([2.0, 1e-40, 0.0]))
    tensor([2.0000e+00, 1.4929e-36, 0.0000e+00])
    """
    return torch.where(scales > 0, scales.clamp(min=MIN_SCALE), scales)


def quantise(x: Tensor, scales: Tensor, levels: int, block: int, key: int | None) -> Tensor:
    """q = x·levels/scale rounded at random to a neighbouring whole number, E[q] = x·levels/scale; int8.

    The random numbers are a hash of key and position; without a key, the nearest whole number is taken. Values beyond
    the scale become ±levels.

    >>> quantise(torch.tensor([1.0, -3.0, 0.0]), torch.tensor([3.0]), levels=3, block=4, key=0)
    tensor([ 1, -3,  0], dtype=torch.int8)
    """
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    inverse = levels / scales
    inverse = torch.where(inverse < torch.inf, inverse, 0.0)  # zeros stay zeros; also where the scale is NaN
    hashes = None if key is None else block_hashes(num_blocks(x.numel(), block), key, x.device)
    for rows, values, codes in _as_matrices(block, x, out):
        if hashes is None:
            call_kernel("quantise_nearest", values, inverse[rows], levels, out=codes)
        else:
            call_kernel("quantise_randomly", values, inverse[rows], hashes[rows], levels, out=codes)
    return out


def dequantise(codes: Tensor, scales: Tensor, levels: int, block: int) -> Tensor:
    """q·scale/levels.

    Each element is rounded once, so that every version and every rank gets the same.

    >>> dequantise(torch.tensor([1, -3, 0], dtype=torch.int8), torch.tensor([3.0]), levels=3, block=4)
    tensor([ 1., -3.,  0.])
    """
    out = torch.empty(codes.shape, device=codes.device)
    step = scales / levels
    for rows, numbers, values in _as_matrices(block, codes, out):
        call_kernel("dequantise", numbers, step[rows], out=values)
    return out


def quantisation_error(x: Tensor, codes: Tensor, scales: Tensor, levels: int, block: int) -> Tensor:
    """x − dequantise(codes): what error feedback keeps, in one pass.

    >>> codes = torch.tensor([1], dtype=torch.int8)
    >>> quantisation_error(torch.tensor([1.5]), codes, torch.tensor([3.0]), levels=3, block=4)
    tensor([0.5000])
    """
    out = torch.empty(x.shape, device=x.device)
    step = scales / levels
    for rows, values, numbers, errors in _as_matrices(block, x, codes, out):
        call_kernel("quantisation_error", values, numbers, step[rows], out=errors)
    return out


def all_finite(x: Tensor) -> Tensor:
    """Whether no value is NaN or infinite, as a tensor; isfinite().all() takes fifteen times as long on a CPU.

    >>> all_finite(torch.tensor([1.0, -2.0])).item(), all_finite(torch.tensor([1.0, torch.nan])).item()
    (True, False)
    """
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(as_reals(x))
    return low.isfinite() & high.isfinite()


def num_blocks(count: int, block: int) -> int:
    """Blocks that so many elements fill, the last one perhaps in part."""
    return -(-count // block)


def _as_matrices(block: int, *vectors: Tensor) -> list[tuple[Any, ...]]:
    """The whole blocks of vectors as matrices, and the rest as matrices of one row; first, which blocks they are."""
    whole = vectors[0].numel() // block
    parts: list[tuple[Any, ...]] = []
    if whole:
        parts.append((slice(0, whole), *(v[: whole * block].view(whole, block) for v in vectors)))
    if vectors[0].numel() % block:
        parts.append((slice(whole, None), *(v[whole * block :].view(1, -1) for v in vectors)))
    return parts
