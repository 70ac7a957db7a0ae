"""The kernels in Triton's language: one pass each, to the bit what `formulas` computes.

A program works on a tile with the axes row, part and column. A row is a scale block, cut into parts of as many columns.
Triton gives four neighbouring columns to a thread, goes on with the next rows, and repeats that for each part. So a
thread has some values of every part of a row: what is computed for a row is computed less often, and the threads that
share a row are in one warp. Parts and columns are powers of two; columns beyond the end of a block are masked. Where a
tile is full there are no masks; elsewhere it is done in several steps, FEW rows each. Sizes are not specialised, so
that other sizes need no compilation. All kernels must be launched with enable_fp_fusion=False: products and sums are
rounded apart.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

from thinwire.kernels import formulas, hashing

MIN_SCALE = tl.constexpr(formulas.MIN_SCALE)
TWO_BIT_STEP = tl.constexpr(formulas.TWO_BIT_STEP)
MULTIPLIER = tl.constexpr(hashing.MULTIPLIER % 2**32)
DITHER = tl.constexpr(hashing.DITHER)
ROUNDER = tl.constexpr(1.5 * 2**23)  # adding it rounds to a whole number, half to even, which are the low bits then
TWICE_INFINITY = tl.constexpr(0xFF000000)  # the bits of infinity, shifted left by one
WHOLE = tl.constexpr(2.0**23 + 128)  # its low 8 bits, the highest one inverted, add a signed number: no conversion
WHOLE_BITS = tl.constexpr(0x4B000080)


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
def _inside(PARTS: tl.constexpr, COLS: tl.constexpr):
    """Places in a row, by part and column."""
    return tl.arange(0, PARTS)[None, :, None] * COLS + tl.arange(0, COLS)[None, None, :]


@triton.jit
def _left(count, begin, MOST: tl.constexpr):
    """How much of a vector is left, up to MOST: 32 bits are enough for masks then."""
    return tl.maximum(tl.minimum(count - begin, MOST), 0).to(tl.int32)


@triton.jit
def _double_bits(x):
    """The bits without the sign: whole numbers in the order of the absolute values, NaN above all."""
    return x.to(tl.uint32, bitcast=True) * 2


@triton.jit
def _largest(double_bits):
    """The largest absolute value in each row; inf for NaN."""
    top = tl.minimum(tl.max(tl.max(double_bits, axis=1), axis=1), TWICE_INFINITY)
    return (top >> 1).to(tl.float32, bitcast=True)


@triton.jit
def _clamp_scales(scales):
    return tl.where(scales > 0, tl.maximum(scales, MIN_SCALE), scales)


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
def _dithered(scaled, positions, hashes):
    """Adds what makes rounding to the nearest random."""
    mixed = (_hash((positions + 1).to(tl.uint32)) ^ hashes) * MULTIPLIER
    return scaled + mixed.to(tl.int32, bitcast=True).to(tl.float32) * DITHER


@triton.jit
def _abs_max_tile(
    x, out, block, count, start, ROWS: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr
):
    rows, inside = start + tl.arange(0, ROWS), _inside(PARTS, COLS)
    places = rows[:, None, None] * block + inside
    values = _load(x + places, (inside < block) & (places < count), FULL)
    _store(out + rows, _clamp_scales(_largest(_double_bits(values))), rows * block < count, FULL)


@triton.jit(do_not_specialize=["count", "width"])
def abs_max(
    x, out, count, width,
    ROWS: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Largest absolute value of each block."""
    block = PARTS * COLS if EVEN else width
    first = tl.program_id(0).to(tl.int64) * ROWS
    x, out, count = x + first * block, out + first, _left(count, first * block, ROWS * PARTS * COLS)
    if EVEN and count == ROWS * PARTS * COLS:
        _abs_max_tile(x, out, block, count, 0, ROWS, PARTS, COLS, True)
    else:
        for start in tl.range(0, ROWS, FEW):
            _abs_max_tile(x, out, block, count, start, FEW, PARTS, COLS, False)


@triton.jit
def _quantise_tile(
    x, scales, codes, error, key, first, block, levels, count, start, RANDOM: tl.constexpr, ERROR: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    rows, inside = start + tl.arange(0, ROWS), _inside(PARTS, COLS)
    places = rows[:, None, None] * block + inside
    mask = (inside < block) & (places < count)
    scale = _load(scales + rows, rows * block < count, FULL)
    values = _load(x + places, mask, FULL)
    scaled = values * _inverse(scale, levels)[:, None, None]
    if RANDOM:
        scaled = _dithered(scaled, inside, _block_hashes(first + rows, key)[:, None, None])
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    rounded = tl.minimum(tl.maximum(scaled, -levels), levels) + ROUNDER
    QUAD: tl.constexpr = 4 if COLS >= 4 else COLS  # codes at a time; with more, threads would have to exchange values
    numbers = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    _store(codes + tl.max_contiguous(places, [1, 1, QUAD]), numbers, mask, FULL)
    if ERROR:
        _store(error + places, values - (rounded - ROUNDER) * _steps(scale, levels)[:, None, None], mask, FULL)


@triton.jit(do_not_specialize=["key", "count", "width"])
def quantise(
    x, scales, codes, error, key, levels, count, width, RANDOM: tl.constexpr, ERROR: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of 8 bits with given scales, and what they lose."""
    block = PARTS * COLS if EVEN else width
    first = tl.program_id(0) * ROWS
    begin = first.to(tl.int64) * block
    x, scales, codes, error = x + begin, scales + first, codes + begin, error + begin
    count = _left(count, begin, ROWS * PARTS * COLS)
    if EVEN and count == ROWS * PARTS * COLS:
        _quantise_tile(
            x, scales, codes, error, key, first, block, levels, count, 0, RANDOM, ERROR, ROWS, PARTS, COLS, True
        )
    else:
        for start in tl.range(0, ROWS, FEW):
            _quantise_tile(
                x, scales, codes, error, key, first, block, levels, count, start,
                RANDOM, ERROR, FEW, PARTS, COLS, False,
            )  # fmt: skip


@triton.jit
def _dequantise_tile(
    codes, scales, given, out, block, levels, count, start, GIVEN: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    rows, inside = start + tl.arange(0, ROWS), _inside(PARTS, COLS)
    places = rows[:, None, None] * block + inside
    mask = (inside < block) & (places < count)
    QUAD: tl.constexpr = 4 if COLS >= 4 else COLS
    bits = _load(codes + tl.max_contiguous(places, [1, 1, QUAD]), mask, FULL).to(tl.uint8, bitcast=True)
    subtracted_from = _load(given + places, mask, FULL) if GIVEN else 0.0
    scale = _load(scales + rows, rows * block < count, FULL)
    numbers = (bits.to(tl.int32) ^ WHOLE_BITS).to(tl.float32, bitcast=True) - WHOLE
    values = numbers * _steps(scale, levels)[:, None, None]
    _store(out + places, subtracted_from - values if GIVEN else values, mask, FULL)


@triton.jit(do_not_specialize=["count", "width"])
def dequantise(
    codes, scales, given, out, levels, count, width, GIVEN: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """codes·scale/levels, or given − codes·scale/levels."""
    block = PARTS * COLS if EVEN else width
    first = tl.program_id(0).to(tl.int64) * ROWS
    begin = first * block
    codes, scales, given, out = codes + begin, scales + first, given + begin, out + begin
    count = _left(count, begin, ROWS * PARTS * COLS)
    if EVEN and count == ROWS * PARTS * COLS:
        _dequantise_tile(codes, scales, given, out, block, levels, count, 0, GIVEN, ROWS, PARTS, COLS, True)
    else:
        for start in tl.range(0, ROWS, FEW):
            _dequantise_tile(codes, scales, given, out, block, levels, count, start, GIVEN, FEW, PARTS, COLS, False)
