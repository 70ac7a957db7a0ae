"""What the eager and the compiled kernels compute: plain torch on matrices with a scale block per row.

Products and sums are separate operations, each rounded, so that every version can give the same to the bit. Results are
written into tensors that are given. `whole` is the type of codes before they are stored: torch.compile makes int32
faster than bytes, eager torch does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.bits import pack, unpack
from thinwire.kernels.hashing import DITHER, MULTIPLIER

Dither = tuple[Tensor, Tensor] | None  # hashes of blocks and of positions; None: to the nearest
TWO_BIT_STEP = 0.375  # of the largest value; of those tried, it lost least of a VGG's gradients (docs/log.md)
MIN_SCALE = 127 * 2.0**-126  # a 127th of it, the finest step there is, is the smallest number of full precision


def clamp_scales(scales: Tensor) -> Tensor:
    """Scales that can be divided by: those above zero are at least MIN_SCALE, 1.5·10⁻³⁶.

    Smaller ones have no reciprocal in float32. Values below that, denormal numbers included, are rounded to steps of
    2⁻¹²⁶ or more: at random, so right on average, or to the nearest, and error feedback keeps the rest.

    >>> clamp_scales(torch.tensor([2.0, 1e-40, 0.0]))
    tensor([2.0000e+00, 1.4929e-36, 0.0000e+00])
    """
    return torch.where(scales > 0, scales.clamp(min=MIN_SCALE), scales)


def abs_max(x: Tensor, out: Tensor) -> None:
    """Largest absolute value of each row, clamped; inf where a value is not finite."""
    out.copy_(_largest(x))


def two_bit_steps(x: Tensor, out: Tensor) -> None:
    """For each row the step whose multiples by −2, −1, 0 and 1 come near to its values: −2 is for the largest one.

    So the step has the other sign than that. inf where a value is not finite.

    >>> steps = torch.empty(2)
    >>> two_bit_steps(torch.tensor([[8.0, -1.0], [2.0, -8.0]]), steps)
    >>> steps
    tensor([-3.,  3.])
    """
    scales = _largest(x)
    is_positive = (-x.amin(-1) < scales) & (scales < torch.inf)  # of zeros none: their step must not be −0
    steps = scales * TWO_BIT_STEP
    out.copy_(torch.where(is_positive, -steps, steps))


def quantise(
    x: Tensor, scales: Tensor, dither: Dither, levels: float, whole: torch.dtype, codes: Tensor, error: Tensor | None
) -> None:
    """codes = x·levels/scale, rounded, within ±levels; error = x − codes·scale/levels."""
    codes.copy_(_round(x, scales, dither, levels, -levels).to(whole))
    if error is not None:
        torch.sub(x, codes * _steps(scales, levels), out=error)


def dequantise(codes: Tensor, scales: Tensor, levels: float, given: Tensor | None, out: Tensor) -> None:
    """codes·scale/levels, or given − codes·scale/levels."""
    if given is None:
        torch.mul(codes, _steps(scales, levels), out=out)
    else:
        torch.sub(given, codes * _steps(scales, levels), out=out)


def encode(
    x: Tensor, scales: Tensor, dither: Dither, bits: int, whole: torch.dtype, packed: Tensor, error: Tensor | None
) -> None:
    """Packed codes of each row, and what they lose; NaN where the scale is not finite.

    To the nearest with 2 bits, scales are `two_bit_steps`, and all four codes are used.
    """
    levels = float(2 ** (bits - 1) - 1)
    codes = _round(x, scales, dither, levels, -2.0 if bits == 2 and dither is None else -levels).to(whole)
    if bits == 8:
        packed.view(torch.int8).copy_(codes)
    else:
        packed.copy_(pack(codes, bits))
    if error is not None:
        torch.sub(x, codes * _steps(_finite_or_nan(scales), levels), out=error)


def decode_mean(packed: Tensor, scales: Tensor, bits: int, out: Tensor) -> None:
    """The mean over the first axis, in its order, of what rows of scales and packed codes stand for."""
    levels = float(2 ** (bits - 1) - 1)
    steps = _steps(_finite_or_nan(scales), levels)
    torch.mul(unpack(packed[0], bits), steps[0], out=out)
    for i in range(1, len(packed)):
        out.add_(unpack(packed[i], bits) * steps[i])
    if len(packed) > 1:
        out.div_(out.new_full((), len(packed)))


def _largest(x: Tensor) -> Tensor:
    top = x.abs().amax(-1)
    return clamp_scales(torch.where(top < torch.inf, top, torch.inf))


def _round(x: Tensor, scales: Tensor, dither: Dither, levels: float, lowest: float) -> Tensor:
    inverse = scales.reciprocal() * levels
    inverse = torch.where(inverse < torch.inf, inverse, 0.0)  # zeros stay zeros; also where the scale is NaN
    scaled = x * inverse[..., None]
    if dither is not None:
        blocks, positions = dither
        scaled.add_(torch.bitwise_xor(positions, blocks[..., None]).mul_(MULTIPLIER) * DITHER)
    return scaled.round_().clamp_(lowest, levels)


def _steps(scales: Tensor, levels: float) -> Tensor:
    """scale/levels; a GPU would multiply by the reciprocal of a plain number, which is not always the same."""
    return (scales / scales.new_full((), levels))[..., None]


def _finite_or_nan(scales: Tensor) -> Tensor:
    return torch.where(scales < torch.inf, scales, torch.nan)
