"""The kernels in Triton's language: one pass each, to the bit what `formulas` computes.

A program works on a tile: some scale blocks (rows), each padded to a power of two (columns). Codes of 4 and 2 bits lie
in 2 or 4 pieces of a block, which share bytes, so a row is then one piece wide. Where a tile is full there are no
masks. All kernels must be launched with enable_fp_fusion=False: products and sums are rounded apart.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

from thinwire.kernels import formulas, hashing

MIN_SCALE = tl.constexpr(formulas.MIN_SCALE)
MULTIPLIER = tl.constexpr(hashing.MULTIPLIER % 2**32)
DITHER = tl.constexpr(hashing.DITHER)
ROUNDER = tl.constexpr(1.5 * 2**23)  # adding it rounds to a whole number, half to even, which are the low bits then
ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _hash(numbers):
    """See hashing.hash_; uint32."""
    numbers ^= numbers >> 16
    numbers *= 0x7FEB352D
    numbers ^= numbers >> 15
    numbers *= 0x846CA68B
    numbers ^= numbers >> 16
    return numbers


@triton.jit
def _load(pointers, mask, FULL: tl.constexpr):
    return tl.load(pointers) if FULL else tl.load(pointers, mask=mask, other=0)


@triton.jit
def _store(pointers, values, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _largest(x):
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, float("inf")), axis=1)  # inf for NaN


@triton.jit
def _clamp_scales(scales):
    return tl.where(scales > 0, tl.maximum(scales, MIN_SCALE), scales)


@triton.jit
def _finite_or_nan(scales):
    return tl.where(scales < float("inf"), scales, float("nan"))


@triton.jit
def _inverse(scales, levels):
    inverse = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales) * levels
    return tl.where(inverse < float("inf"), inverse, 0.0)


@triton.jit
def _steps(scales, levels):
    return tl.div_rn(scales, tl.zeros(scales.shape, tl.float32) + levels)


@triton.jit
def _block_hashes(blocks, key):
    return _hash(_hash((blocks + 1).to(tl.uint32)) ^ key.to(tl.uint32, bitcast=True))


@triton.jit
def _codes(x, inverse, hashes, positions, levels, RANDOM: tl.constexpr):
    """Whole numbers within ±levels; int32."""
    scaled = x * inverse[:, None]
    if RANDOM:
        mixed = (_hash((positions + 1).to(tl.uint32))[None, :] ^ hashes[:, None]) * MULTIPLIER
        scaled = scaled + mixed.to(tl.int32, bitcast=True).to(tl.float32) * DITHER
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -levels), levels)
    return (scaled + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS


@triton.jit
def _abs_max_tile(x, out, rows, cols, block, count, FULL: tl.constexpr):
    places = rows[:, None] * block + cols[None, :]
    values = _load(x + places, (cols[None, :] < block) & (places < count), FULL)
    _store(out + rows, _clamp_scales(_largest(values)), rows * block < count, FULL)


@triton.jit
def abs_max(x, out, count, block, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    """Largest absolute value of each block."""
    width = COLS if EVEN else block
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    x, out, count = x + first * width, out + first, count - first * width
    if EVEN and count >= ROWS * COLS:
        _abs_max_tile(x, out, rows, cols, width, count, True)
    else:
        _abs_max_tile(x, out, rows, cols, width, count, False)


@triton.jit
def _quantise_tile(
    x, scales, codes, error, key, first, rows, cols, block, levels, count,
    RANDOM: tl.constexpr, ERROR: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    places = rows[:, None] * block + cols[None, :]
    mask = (cols[None, :] < block) & (places < count)
    scale = _load(scales + rows, rows * block < count, FULL)
    values = _load(x + places, mask, FULL)
    hashes = _block_hashes(first + rows, key)
    numbers = _codes(values, _inverse(scale, levels), hashes, cols, levels, RANDOM)
    _store(codes + places, numbers.to(tl.int8), mask, FULL)
    if ERROR:
        lost = values - numbers.to(tl.float32) * _steps(scale, levels)[:, None]
        _store(error + places, lost, mask, FULL)


@triton.jit(do_not_specialize=["key"])
def quantise(
    x, scales, codes, error, key, levels, count, block,
    RANDOM: tl.constexpr, ERROR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of 8 bits with given scales, and what they lose."""
    width = COLS if EVEN else block
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    begin = first * width
    x, scales, codes, error, count = x + begin, scales + first, codes + begin, error + begin, count - begin
    if EVEN and count >= ROWS * COLS:
        _quantise_tile(x, scales, codes, error, key, first, rows, cols, width, levels, count, RANDOM, ERROR, True)
    else:
        _quantise_tile(x, scales, codes, error, key, first, rows, cols, width, levels, count, RANDOM, ERROR, False)


@triton.jit
def _dequantise_tile(
    codes, scales, given, out, rows, cols, block, levels, count, GIVEN: tl.constexpr, FULL: tl.constexpr
):
    places = rows[:, None] * block + cols[None, :]
    mask = (cols[None, :] < block) & (places < count)
    steps = _steps(_load(scales + rows, rows * block < count, FULL), levels)
    values = _load(codes + places, mask, FULL).to(tl.float32) * steps[:, None]
    if GIVEN:
        values = _load(given + places, mask, FULL) - values
    _store(out + places, values, mask, FULL)


@triton.jit
def dequantise(
    codes, scales, given, out, levels, count, block,
    GIVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """codes·scale/levels, or given − codes·scale/levels."""
    width = COLS if EVEN else block
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    begin = first * width
    codes, scales, given, out, count = codes + begin, scales + first, given + begin, out + begin, count - begin
    if EVEN and count >= ROWS * COLS:
        _dequantise_tile(codes, scales, given, out, rows, cols, width, levels, count, GIVEN, True)
    else:
        _dequantise_tile(codes, scales, given, out, rows, cols, width, levels, count, GIVEN, False)
