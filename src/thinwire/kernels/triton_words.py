"""Kernels in Triton's language for words: scales and packed codes, in the order that `passes.Layout` has."""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

from thinwire.kernels.triton_code import (
    _block_hashes,
    _clamp_scales,
    _codes,
    _finite_or_nan,
    _inverse,
    _largest,
    _load,
    _steps,
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
def _word_places(blocks, num_blocks, row_bytes, piece, ALIGNED: tl.constexpr):
    """Where the scales and the codes of blocks are."""
    begin = (blocks // num_blocks).to(tl.int64) * _aligned(row_bytes, ALIGNED)
    return begin + 4 * (blocks % num_blocks), begin + 4 * num_blocks + (blocks % num_blocks) * piece


@triton.jit
def _encode_piece(
    values, inverse, steps, hashes, positions, error, places, mask,
    BITS: tl.constexpr, RANDOM: tl.constexpr, ERROR: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The codes of a piece, in the low bits, and what they lose."""
    numbers = _codes(values, inverse, hashes, positions, 2.0 ** (BITS - 1) - 1.0, RANDOM)
    if ERROR:
        _store(error + places, values - numbers.to(tl.float32) * steps[:, None], mask, FULL)
    return numbers & (2**BITS - 1)


@triton.jit
def _encode_tile(
    x, words, error, key, blocks, rows, cols, piece, num_blocks, row_bytes, all_blocks, count, BITS: tl.constexpr,
    RANDOM: tl.constexpr, ERROR: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    p0 = rows[:, None] * (piece * (8 // BITS)) + cols[None, :]  # places of the first piece, and so on
    p1, p2, p3 = p0 + piece, p0 + 2 * piece, p0 + 3 * piece
    inside = cols[None, :] < piece
    m0, m1, m2, m3 = inside & (p0 < count), inside & (p1 < count), inside & (p2 < count), inside & (p3 < count)
    x0 = _load(x + p0, m0, FULL)
    top = _largest(x0)
    if BITS <= 4:
        x1 = _load(x + p1, m1, FULL)
        top = tl.maximum(top, _largest(x1))
    if BITS == 2:
        x2, x3 = _load(x + p2, m2, FULL), _load(x + p3, m3, FULL)
        top = tl.maximum(top, tl.maximum(_largest(x2), _largest(x3)))
    scales = _clamp_scales(top)
    hashes, inverse = _block_hashes(blocks, key), _inverse(scales, 2.0 ** (BITS - 1) - 1.0)
    steps = _steps(_finite_or_nan(scales), 2.0 ** (BITS - 1) - 1.0)
    packed = _encode_piece(x0, inverse, steps, hashes, cols, error, p0, m0, BITS, RANDOM, ERROR, FULL)
    if BITS <= 4:
        next_one = _encode_piece(x1, inverse, steps, hashes, cols + piece, error, p1, m1, BITS, RANDOM, ERROR, FULL)
        packed |= next_one << BITS
    if BITS == 2:
        third = _encode_piece(x2, inverse, steps, hashes, cols + 2 * piece, error, p2, m2, BITS, RANDOM, ERROR, FULL)
        last = _encode_piece(x3, inverse, steps, hashes, cols + 3 * piece, error, p3, m3, BITS, RANDOM, ERROR, FULL)
        packed |= (third << (2 * BITS)) | (last << (3 * BITS))
    scale_places, code_places = _word_places(blocks, num_blocks, row_bytes, piece, ALIGNED)
    _store_scales(words + scale_places, scales, blocks < all_blocks, ALIGNED)
    codes = words + code_places[:, None] + cols[None, :]
    _store(codes, packed.to(tl.uint8), inside & (blocks < all_blocks)[:, None], FULL)


@triton.jit(do_not_specialize=["key"])
def encode(
    x, words, error, key, count, piece_width, num_blocks, row_bytes, all_blocks, BITS: tl.constexpr,
    RANDOM: tl.constexpr, ERROR: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Scales and packed codes of a vector, and what they lose."""
    piece = COLS if EVEN else piece_width
    first = tl.program_id(0) * ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    begin = first.to(tl.int64) * (piece * (8 // BITS))
    x, error, count = x + begin, error + begin, count - begin
    if EVEN and count >= ROWS * COLS * (8 // BITS):
        _encode_tile(
            x, words, error, key, first + rows, rows, cols, piece, num_blocks, row_bytes, all_blocks, count,
            BITS, RANDOM, ERROR, ALIGNED, True,
        )  # fmt: skip
    else:
        _encode_tile(
            x, words, error, key, first + rows, rows, cols, piece, num_blocks, row_bytes, all_blocks, count,
            BITS, RANDOM, ERROR, ALIGNED, False,
        )  # fmt: skip


@triton.jit
def _add_piece(total, packed, steps, PIECE: tl.constexpr, BITS: tl.constexpr):
    numbers = (packed << (32 - BITS * (PIECE + 1))) >> (32 - BITS)  # and with it the sign
    return total + numbers.to(tl.float32) * steps[:, None]


@triton.jit
def _store_mean(out, total, mask, RANKS: tl.constexpr, FULL: tl.constexpr):
    if RANKS & (RANKS - 1) == 0:
        total = total * (1.0 / RANKS)  # of a power of two, the same to the bit
    else:
        total = tl.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
    _store(out, total, mask, FULL)


@triton.jit
def _decode_tile(
    words, out, rank_bytes, blocks, rows, cols, piece, num_blocks, row_bytes, all_blocks, count,
    BITS: tl.constexpr, ALIGNED: tl.constexpr, RANKS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    scale_places, code_places = _word_places(blocks, num_blocks, row_bytes, piece, ALIGNED)
    inside = cols[None, :] < piece
    there = blocks < all_blocks
    t0 = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    t1, t2, t3 = t0, t0, t0
    for _ in tl.range(0, RANKS, loop_unroll_factor=4):
        scales = _load_scales(words + scale_places, there, ALIGNED)
        packed = _load(words + code_places[:, None] + cols[None, :], inside & there[:, None], FULL).to(tl.int32)
        steps = _steps(_finite_or_nan(scales), 2.0 ** (BITS - 1) - 1.0)
        t0 = _add_piece(t0, packed, steps, 0, BITS)
        if BITS <= 4:
            t1 = _add_piece(t1, packed, steps, 1, BITS)
        if BITS == 2:
            t2, t3 = _add_piece(t2, packed, steps, 2, BITS), _add_piece(t3, packed, steps, 3, BITS)
        words += _aligned(rank_bytes, ALIGNED)
    p0 = rows[:, None] * (piece * (8 // BITS)) + cols[None, :]
    _store_mean(out + p0, t0, inside & (p0 < count), RANKS, FULL)
    if BITS <= 4:
        _store_mean(out + p0 + piece, t1, inside & (p0 + piece < count), RANKS, FULL)
    if BITS == 2:
        _store_mean(out + p0 + 2 * piece, t2, inside & (p0 + 2 * piece < count), RANKS, FULL)
        _store_mean(out + p0 + 3 * piece, t3, inside & (p0 + 3 * piece < count), RANKS, FULL)


@triton.jit
def decode_mean(
    words, out, rank_bytes, count, piece_width, num_blocks, row_bytes, all_blocks, BITS: tl.constexpr,
    ALIGNED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The mean over ranks of what words stand for, added up in the order of ranks."""
    piece = COLS if EVEN else piece_width
    first = tl.program_id(0) * ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    begin = first.to(tl.int64) * (piece * (8 // BITS))
    out, count = out + begin, count - begin
    if EVEN and count >= ROWS * COLS * (8 // BITS):
        _decode_tile(
            words, out, rank_bytes, first + rows, rows, cols, piece, num_blocks, row_bytes, all_blocks, count,
            BITS, ALIGNED, RANKS, True,
        )  # fmt: skip
    else:
        _decode_tile(
            words, out, rank_bytes, first + rows, rows, cols, piece, num_blocks, row_bytes, all_blocks, count,
            BITS, ALIGNED, RANKS, False,
        )  # fmt: skip
