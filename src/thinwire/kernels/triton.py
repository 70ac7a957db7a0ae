"""The kernels for CUDA tensors, in Triton; one launch each, and nothing waits for the GPU.

With TRITON_INTERPRET=1, set before Triton is imported, they run on CPU tensors too, slowly: for tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from thinwire.kernels import eager, triton_code, triton_words
from thinwire.kernels.hashing import signed
from thinwire.kernels.passes import Layout

LARGEST_BLOCK = 4096  # larger scale blocks would need programs with more registers than there are
MOST_ROWS = 2**16 - 1  # of words: programs along the second axis of a grid
MASKED_ELEMENTS = 2048  # of a program at a time where there are masks: these need registers too
BITS_OF_ONE = 0x3F800000  # see triton_words


class Launch(NamedTuple):
    """How a kernel is cut into programs."""

    elements: int = 4096  # of a program
    warps: int = 4
    values: int = 16  # of a scale block in a thread, which computes anew what belongs to a block


# Those that differ, chosen by counting instructions (benchmarks/kernel_code.py). With dither, a thread has more blocks:
# it hashes its places in a block only once. Where it also writes what is lost, memory takes longer than hashing.
launches = {
    "quantise random": Launch(elements=8192),
    "encode8 random": Launch(elements=8192),
    "encode4 random": Launch(elements=8192),
    "decode_mean8": Launch(values=32),
    "decode_mean4": Launch(values=32),
}


def abs_max(x: Tensor, block: int, out: Tensor) -> None:
    """See Passes."""
    if block > LARGEST_BLOCK:
        return eager.abs_max(x, block, out)
    return _launch(triton_code.abs_max, (len(out), 1), block, 8, x, out, len(x), block)


def quantise(
    x: Tensor, scales: Tensor, levels: int, block: int, key: int | None, codes: Tensor, error: Tensor | None
) -> None:
    """See Passes."""
    if block > LARGEST_BLOCK:
        return eager.quantise(x, scales, levels, block, key, codes, error)
    return _launch(
        triton_code.quantise, (len(scales), 1), block, 8, x, scales, codes, x if error is None else error,
        signed(key or 0), float(levels), len(x), block, RANDOM=key is not None, ERROR=error is not None,
    )  # fmt: skip


def dequantise(codes: Tensor, scales: Tensor, levels: int, block: int, given: Tensor | None, out: Tensor) -> None:
    """See Passes."""
    if block > LARGEST_BLOCK:
        return eager.dequantise(codes, scales, levels, block, given, out)
    return _launch(
        triton_code.dequantise, (len(scales), 1), block, 8, codes, scales, out if given is None else given, out,
        float(levels), len(codes), block, GIVEN=given is not None,
    )  # fmt: skip


def encode(x: Tensor, layout: Layout, key: int | None, words: Tensor, error: Tensor | None) -> None:
    """See Passes."""
    if layout.block > LARGEST_BLOCK or len(words) > MOST_ROWS:
        return eager.encode(x, layout, key, words, error)
    return _launch(
        triton_words.encode, (layout.num_blocks, len(words)), layout.block, layout.bits, x, words,
        x if error is None else error, signed(key or 0), len(x), layout.block_bytes, layout.num_blocks,
        layout.row_bytes, BITS=layout.bits, RANDOM=key is not None, ERROR=error is not None,
        ALIGNED=_aligned(words, layout),
    )  # fmt: skip


def decode_mean(words: Tensor, layout: Layout, out: Tensor) -> None:
    """See Passes."""
    ranks, rows = words.shape[:2]
    if layout.block > LARGEST_BLOCK or rows > MOST_ROWS:
        return eager.decode_mean(words, layout, out)
    return _launch(
        triton_words.decode_mean, (layout.num_blocks, rows), layout.block, layout.bits, words, out, BITS_OF_ONE,
        rows * layout.row_bytes, len(out), layout.block_bytes, layout.num_blocks, layout.row_bytes, BITS=layout.bits,
        ALIGNED=_aligned(words, layout), RANKS=ranks,
    )  # fmt: skip


def _launch(
    kernel: Any, blocks: tuple[int, int], block: int, bits: int, *args: Tensor | float, **constants: int
) -> None:
    """Launch a kernel on rows of so many blocks of this size: (blocks in a row, rows)."""
    if not blocks[0] * blocks[1]:
        return
    launch = launches.get(launch_name(kernel.__name__, **constants), Launch())
    piece = block * bits // 8
    columns = triton.next_power_of_2(piece)
    parts = min(launch.values * bits // 32, columns)
    rows = max(1, launch.elements * bits // 8 // columns)
    few = min(rows, max(1, MASKED_ELEMENTS * bits // 8 // columns))
    with torch.cuda.device_of(args[0]):
        kernel[(triton.cdiv(blocks[0], rows), blocks[1])](
            *args, **constants, ROWS=rows, FEW=few, PARTS=parts, COLS=columns // parts, EVEN=columns == piece,
            num_warps=launch.warps, enable_fp_fusion=False,
        )  # fmt: skip


def launch_name(kernel: str, BITS: int | str = "", RANDOM: int = False, ERROR: int = False, **others: int) -> str:
    """What a kernel is called in `launches`."""
    return f"{kernel}{BITS}" + (" random" if RANDOM and not ERROR else "")


def _aligned(words: Tensor, layout: Layout) -> bool:
    return layout.row_bytes % 4 == 0 and words.data_ptr() % 4 == 0
