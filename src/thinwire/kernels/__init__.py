"""What compression does to every element, made fast: quantise, dequantise, pack, unpack.

A vector is cut into blocks that share a scale; the last one may be short. `eager` is the reference and works
everywhere. THINWIRE_KERNELS=compiled asks for the compiled versions, two to three times as fast on a CPU.
A new version, in Triton say, is a module with the same five functions, added to `_module`.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.common.dtypes import as_reals
from thinwire.common.messages import say
from thinwire.errors import UsageError
from thinwire.kernels import eager
from thinwire.kernels.hashing import rows

POSSIBLE = ("eager", "compiled")
LEAST_SCALE = 127 * 2.0**-126  # a 127th of it, the finest step there is, is the smallest number of full precision


def largest(x: Tensor, block: int) -> Tensor:
    """Largest absolute value of each block, as a `usable` scale; inf where a value is not finite.

    >>> largest(torch.tensor([1.0, -3.0, 2.0]), block=2)
    tensor([3., 2.])
    """
    out = torch.empty(num_blocks(x.numel(), block), device=x.device)
    for part, values in _in_rows(block, x):
        _call("largest", values, out=out[part])
    return usable(torch.where(out < torch.inf, out, torch.inf))


def usable(scales: Tensor) -> Tensor:
    """Scales that can be divided by: those above zero are at least LEAST_SCALE, 1.5·10⁻³⁶.

    Smaller ones have no reciprocal in float32. Values below that, denormal numbers included, are rounded to steps of
    2⁻¹²⁶ or more: at random, so right on average, or to the nearest, and error feedback keeps the rest.

    >>> usable(torch.tensor([2.0, 1e-40, 0.0]))
    tensor([2.0000e+00, 1.4929e-36, 0.0000e+00])
    """
    return torch.where(scales > 0, scales.clamp(min=LEAST_SCALE), scales)


def quantise(x: Tensor, scales: Tensor, levels: int, block: int, key: int | None) -> Tensor:
    """q = x·levels/scale rounded at random to a neighbouring whole number, E[q] = x·levels/scale; int8.

    The random numbers are a hash of key and place; without a key, the nearest whole number. What is beyond the scale
    becomes ±levels.

    >>> quantise(torch.tensor([1.0, -3.0, 0.0]), torch.tensor([3.0]), levels=3, block=4, key=0)
    tensor([ 1, -3,  0], dtype=torch.int8)
    """
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    inverse = levels / scales
    inverse = torch.where(inverse < torch.inf, inverse, 0.0)  # zeros stay zeros; also where the scale is NaN
    keys = None if key is None else rows(num_blocks(x.numel(), block), key, x.device)
    for part, values, codes in _in_rows(block, x, out):
        if keys is None:
            _call("nearest", values, inverse[part], levels, out=codes)
        else:
            _call("quantise", values, inverse[part], keys[part], levels, out=codes)
    return out


def dequantise(codes: Tensor, scales: Tensor, levels: int, block: int) -> Tensor:
    """q·scale/levels.

    One rounding an element, so that every version and every rank gets the same.

    >>> dequantise(torch.tensor([1, -3, 0], dtype=torch.int8), torch.tensor([3.0]), levels=3, block=4)
    tensor([ 1., -3.,  0.])
    """
    out = torch.empty(codes.shape, device=codes.device)
    step = scales / levels
    for part, numbers, values in _in_rows(block, codes, out):
        _call("dequantise", numbers, step[part], out=values)
    return out


def lost(x: Tensor, codes: Tensor, scales: Tensor, levels: int, block: int) -> Tensor:
    """x − dequantise(codes): what error feedback keeps, in one pass.

    >>> lost(torch.tensor([1.5]), torch.tensor([1], dtype=torch.int8), torch.tensor([3.0]), levels=3, block=4)
    tensor([0.5000])
    """
    out = torch.empty(x.shape, device=x.device)
    step = scales / levels
    for part, values, numbers, rest in _in_rows(block, x, codes, out):
        _call("lost", values, numbers, step[part], out=rest)
    return out


def pack(codes: Tensor, bits: int) -> Tensor:
    """Numbers of a few bits as bytes, along the last axis; its length must be a multiple of 8/bits.

    >>> pack(torch.tensor([1, -1, 0, 2], dtype=torch.int8), bits=4).tolist()
    [1, 47]
    """
    if bits >= 8:
        return codes.contiguous().view(torch.uint8)
    pieces = codes.view(torch.uint8).unflatten(-1, (8 // bits, -1)).unbind(-2)  # first half in the low bits, …
    packed: Tensor = pieces[0] & (2**bits - 1)
    for i, piece in enumerate(pieces[1:], 1):
        packed |= (piece & (2**bits - 1)) << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int, signed: bool = True) -> Tensor:
    """What `pack` packed.

    >>> unpack(pack(torch.tensor([1, -1, 0, 2], dtype=torch.int8), bits=4), bits=4).tolist()
    [1, -1, 0, 2]
    """
    if bits >= 8:
        return packed.contiguous().view(torch.int8 if bits == 8 else torch.int16)
    packed = packed.view(torch.int8)
    codes = torch.stack([packed << (8 - bits * (i + 1)) for i in range(8 // bits)], -2).flatten(-2)
    codes >>= 8 - bits  # and with it the sign
    return codes if signed else codes & (2**bits - 1)


def all_finite(x: Tensor) -> Tensor:
    """Whether no value is NaN or infinite, as a tensor; isfinite().all() takes fifteen times as long on a CPU.

    >>> all_finite(torch.tensor([1.0, -2.0])).item(), all_finite(torch.tensor([1.0, torch.nan])).item()
    (True, False)
    """
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(as_reals(x))
    return low.isfinite() & high.isfinite()


def check_choice() -> None:
    """Raise UsageError for an unknown THINWIRE_KERNELS, before any work."""
    _module("cpu")


def num_blocks(count: int, block: int) -> int:
    """Blocks that so many elements fill, the last perhaps in part."""
    return -(-count // block)


def _in_rows(block: int, *vectors: Tensor) -> list[tuple[Any, ...]]:
    """The whole blocks of some vectors as matrices, and the rest as matrices of one row; first, their numbers."""
    whole = vectors[0].numel() // block
    parts: list[tuple[Any, ...]] = []
    if whole:
        parts.append((slice(0, whole), *(v[: whole * block].view(whole, block) for v in vectors)))
    if vectors[0].numel() % block:
        parts.append((slice(whole, None), *(v[whole * block :].view(1, -1) for v in vectors)))
    return parts


def _call(name: str, x: Tensor, *args: Tensor | int, out: Tensor) -> None:
    module = _module(x.device.type) if x.shape[0] > 1 else eager
    if module is not eager:
        try:
            getattr(module, name)(x, *args, out)
            return
        except Exception as error:  # whatever a compiler may fail with
            _module.cache_clear()
            _broken.append(x.device.type)
            say(
                f"kernels cannot be compiled here ({str(error).splitlines()[0]}); going on with the eager ones",
                once=True,
            )
    getattr(eager, name)(x, *args, out)


_broken: list[str] = []


@functools.cache
def _module(device: str) -> ModuleType:
    asked = os.environ.get("THINWIRE_KERNELS", "eager")
    if asked not in POSSIBLE:
        raise UsageError(f"THINWIRE_KERNELS={asked}; possible: {', '.join(POSSIBLE)}")
    if asked == "eager" or device in _broken:
        return eager
    say("compiling kernels: the first steps take some seconds, up to half a minute", once=True)
    return importlib.import_module("thinwire.kernels.compiled")
