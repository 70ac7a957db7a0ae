"""Kernels in Triton's language for words: scales and packed codes, in the order that `passes.Layout` has.

The second axis of the grid is the row of words, the first one the tile in it: nothing is divided to find a place.
Codes of 4 and 2 bits lie in 2 or 4 pieces of a block, which share bytes. So a tile has an axis more: its axes are row,
piece, part of a piece, and column.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

from thinwire.kernels.triton_code import (
    ROUNDER,
    TWO_BIT_STEP,
    _block_hashes,
    _clamp_scales,
    _dithered,
    _double_bits,
    _inside,
    _inverse,
    _largest,
    _left,
    _load,
    _store,
)


@triton.jit
def _store_scales(words, scales, mask, ALIGNED: tl.constexpr):
    """Four bytes each; where a row of words does not begin at a multiple of four, byte by byte."""
    if ALIGNED:
        tl.store(words.to(tl.pointer_type(tl.float32), bitcast=True), scales, mask=mask)
    else:
        bits = scales.to(tl.uint32, bitcast=True)
        for i in tl.static_range(4):
            tl.store(words + i, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _load_scales(words, mask, ALIGNED: tl.constexpr):
    if ALIGNED:
        scales = tl.load(words.to(tl.pointer_type(tl.float32), bitcast=True), mask=mask, other=0)
    else:
        bits = tl.load(words, mask=mask, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            bits |= tl.load(words + i, mask=mask, other=0).to(tl.uint32) << (8 * i)
        scales = bits.to(tl.float32, bitcast=True)
    return scales


@triton.jit
def _aligned(num_bytes, ALIGNED: tl.constexpr):
    """Says to the compiler that this is a multiple of four, if it is."""
    return num_bytes // 4 * 4 if ALIGNED else num_bytes


@triton.jit
def _steps_or_nan(scales, BITS: tl.constexpr):
    """Steps between codes; NaN where the scale is not finite.

    With 127 and 7 levels no quotient is so near to the middle of two float32 that float64 would round it to the other.
    Nothing branches, as a division in float32 would, so all loads are issued before the first one is waited for.
    """
    steps = tl.where(scales < float("inf"), scales, float("nan"))
    if BITS > 2:
        steps = (steps.to(tl.float64) * (1.0 / (2.0 ** (BITS - 1) - 1.0))).to(tl.float32)
    return steps


@triton.jit
def _two_bit_steps(scales, lowest):
    """See formulas.two_bit_steps."""
    steps = scales * TWO_BIT_STEP
    return tl.where((-lowest < scales) & (scales < float("inf")), -steps, steps)


@triton.jit
def _by_row(values):
    return values[:, None, None, None]


@triton.jit
def _encode_tile(
    x, words, codes, error, key, first, rows_left, piece, count, start, BITS: tl.constexpr, RANDOM: tl.constexpr,
    ERROR: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Without a clamp where it would change nothing: |x·inverse| is at most levels·(1 + 2⁻²¹) and rounds to levels.

    Dither may lift that to the next half with 127 levels, but not with 7 or 1. tests/kernels/test_triton.py tries it.
    With 2 bits to the nearest, values go beyond the outermost codes.
    """
    rows, inside = start + tl.arange(0, ROWS), _inside(PARTS, COLS)
    pieces = tl.arange(0, 8 // BITS)[None, :, None, None]
    here = (inside < piece) & (rows < rows_left)[:, None, None]
    positions = pieces * piece + inside[:, None, :, :]
    places = _by_row(rows) * (piece * (8 // BITS)) + positions
    mask = here[:, None, :, :] & (places < count)
    values = _load(x + places, mask, FULL)
    scales = _clamp_scales(_largest(tl.max(_double_bits(values), axis=1)))
    if BITS == 2 and not RANDOM:
        scales = _two_bit_steps(scales, tl.min(tl.min(tl.min(values, axis=1), axis=1), axis=1))
    _store_scales(words + 4 * rows, scales, rows < rows_left, ALIGNED)
    levels: tl.constexpr = 2.0 ** (BITS - 1) - 1.0
    scaled = values * _by_row(_inverse(scales, levels))
    if RANDOM:
        scaled = _dithered(scaled, positions, _by_row(_block_hashes(first + rows, key)))
        if BITS == 8:
            scaled = tl.minimum(tl.maximum(scaled, -levels), levels)
    elif BITS == 2:
        scaled = tl.minimum(tl.maximum(scaled, -2.0), levels)
    rounder: tl.constexpr = ROUNDER + 2.0 ** (BITS - 1)  # low bits are above 0: pieces can be added up
    rounded = scaled + rounder
    if ERROR:
        _store(error + places, values - (rounded - rounder) * _by_row(_steps_or_nan(scales, BITS)), mask, FULL)
    packed = tl.sum(rounded.to(tl.uint32, bitcast=True) << (pieces * BITS).to(tl.uint32), axis=1)
    signs: tl.constexpr = 255 // (2**BITS - 1) << BITS - 1  # the highest bit of each code
    finite = tl.where(scales < float("inf"), 255, 0).to(tl.uint32)  # else all codes are 0
    spots = rows[:, None, None] * piece + inside
    _store(codes + spots, ((packed ^ signs) & finite[:, None, None]).to(tl.uint8), here, FULL)


@triton.jit(do_not_specialize=["key", "count", "width", "num_blocks", "row_bytes"])
def encode(
    x, words, error, key, count, width, num_blocks, row_bytes, BITS: tl.constexpr, RANDOM: tl.constexpr,
    ERROR: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Scales and packed codes of a vector, and what they lose."""
    piece = PARTS * COLS if EVEN else width
    first = tl.program_id(0) * ROWS
    rows_left = num_blocks - first
    words += tl.program_id(1).to(tl.int64) * _aligned(row_bytes, ALIGNED)
    codes = words + 4 * num_blocks + first.to(tl.int64) * piece
    words += 4 * first
    first += tl.program_id(1) * num_blocks
    begin = first.to(tl.int64) * (piece * (8 // BITS))
    x, error, count = x + begin, error + begin, _left(count, begin, ROWS * PARTS * COLS * (8 // BITS))
    if EVEN and count == ROWS * PARTS * COLS * (8 // BITS) and rows_left >= ROWS:
        _encode_tile(
            x, words, codes, error, key, first, rows_left, piece, count, 0,
            BITS, RANDOM, ERROR, ALIGNED, ROWS, PARTS, COLS, True,
        )  # fmt: skip
    else:
        for start in tl.range(0, ROWS, FEW):
            _encode_tile(
                x, words, codes, error, key, first, rows_left, piece, count, start,
                BITS, RANDOM, ERROR, ALIGNED, FEW, PARTS, COLS, False,
            )  # fmt: skip


@triton.jit
def _numbers(packed, pieces, one, BITS: tl.constexpr):
    """Codes in bytes as float32, without conversions or shifts.

    The bits of a code, the highest one inverted, become bits of a power of two, so large that they count as ones.
    `one` has the bits of 1.0. It is an argument: then a register has it, and masking and inverting are one instruction,
    which can have only one constant.
    """
    shift = pieces * BITS
    start = (one + (23 - shift << 23)) | (1 << shift + BITS - 1)
    number = (packed.to(tl.int32) & (2**BITS - 1 << shift)) ^ start
    return number.to(tl.float32, bitcast=True) - start.to(tl.float32, bitcast=True)


@triton.jit
def _decode_tile(
    words, codes, out, one, rank_bytes, rows_left, piece, count, start, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    rows, inside = start + tl.arange(0, ROWS), _inside(PARTS, COLS)
    pieces = tl.arange(0, 8 // BITS)[None, :, None, None]
    spots = rows[:, None, None] * piece + inside
    here = (inside < piece) & (rows < rows_left)[:, None, None]
    total = tl.full([ROWS, 8 // BITS, PARTS, COLS], -(2**31), tl.int32).to(tl.float32, bitcast=True)  # −0, not 0
    for _ in tl.range(0, RANKS, loop_unroll_factor=4):
        steps = _steps_or_nan(_load_scales(words + 4 * rows, rows < rows_left, ALIGNED), BITS)
        packed = _load(codes + spots, here, FULL)[:, None, :, :]
        total += _numbers(packed, pieces, one, BITS) * _by_row(steps)
        words += _aligned(rank_bytes, ALIGNED)
        codes += _aligned(rank_bytes, ALIGNED)
    if RANKS & (RANKS - 1) == 0:
        total = total * (1.0 / RANKS)  # of a power of two, the same to the bit
    else:
        total = tl.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
    places = _by_row(rows) * (piece * (8 // BITS)) + pieces * piece + inside[:, None, :, :]
    _store(out + places, total, here[:, None, :, :] & (places < count), FULL)


@triton.jit(do_not_specialize=["one", "rank_bytes", "count", "width", "num_blocks", "row_bytes"])
def decode_mean(
    words, out, one, rank_bytes, count, width, num_blocks, row_bytes, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The mean over ranks of what words stand for, added up in the order of ranks."""
    piece = PARTS * COLS if EVEN else width
    first = tl.program_id(0) * ROWS
    rows_left = num_blocks - first
    words += tl.program_id(1).to(tl.int64) * _aligned(row_bytes, ALIGNED)
    codes = words + 4 * num_blocks + first.to(tl.int64) * piece
    words += 4 * first
    begin = (first + tl.program_id(1) * num_blocks).to(tl.int64) * (piece * (8 // BITS))
    out, count = out + begin, _left(count, begin, ROWS * PARTS * COLS * (8 // BITS))
    if EVEN and count == ROWS * PARTS * COLS * (8 // BITS) and rows_left >= ROWS:
        _decode_tile(
            words, codes, out, one, rank_bytes, rows_left, piece, count, 0,
            BITS, ALIGNED, RANKS, ROWS, PARTS, COLS, True,
        )  # fmt: skip
    else:
        for start in tl.range(0, ROWS, FEW):
            _decode_tile(
                words, codes, out, one, rank_bytes, rows_left, piece, count, start,
                BITS, ALIGNED, RANKS, FEW, PARTS, COLS, False,
            )  # fmt: skip
