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


class Launch(NamedTuple):
    """How a kernel is cut into programs."""

    elements: int = 1024  # of a program
    warps: int = 4


launches: dict[str, Launch] = {}  # by kernel and bits, for those that differ


def abs_max(x: Tensor, block: int, out: Tensor) -> None:
    """See Passes."""
    if block > LARGEST_BLOCK:
        return eager.abs_max(x, block, out)
    return _launch(triton_code.abs_max, block, 1, len(out), x, out, len(x), block)


def quantise(
    x: Tensor, scales: Tensor, levels: int, block: int, key: int | None, codes: Tensor, error: Tensor | None
) -> None:
    """See Passes."""
    if block > LARGEST_BLOCK:
        return eager.quantise(x, scales, levels, block, key, codes, error)
    return _launch(
        triton_code.quantise, block, 1, len(scales), x, scales, codes, x if error is None else error, signed(key or 0),
        float(levels), len(x), block, RANDOM=key is not None, ERROR=error is not None,
    )  # fmt: skip


def dequantise(codes: Tensor, scales: Tensor, levels: int, block: int, given: Tensor | None, out: Tensor) -> None:
    """See Passes."""
    if block > LARGEST_BLOCK:
        return eager.dequantise(codes, scales, levels, block, given, out)
    return _launch(
        triton_code.dequantise, block, 1, len(scales), codes, scales, out if given is None else given, out,
        float(levels), len(codes), block, GIVEN=given is not None,
    )  # fmt: skip


def encode(x: Tensor, layout: Layout, key: int | None, words: Tensor, error: Tensor | None) -> None:
    """See Passes."""
    if layout.block > LARGEST_BLOCK:
        return eager.encode(x, layout, key, words, error)
    all_blocks = len(words) * layout.num_blocks
    return _launch(
        triton_words.encode, layout.block_bytes, 8 // layout.bits, all_blocks, x, words, x if error is None else error,
        signed(key or 0), len(x), layout.block_bytes, layout.num_blocks, layout.row_bytes, all_blocks, BITS=layout.bits,
        RANDOM=key is not None, ERROR=error is not None, ALIGNED=_aligned(words, layout),
    )  # fmt: skip


def decode_mean(words: Tensor, layout: Layout, out: Tensor) -> None:
    """See Passes."""
    if layout.block > LARGEST_BLOCK:
        return eager.decode_mean(words, layout, out)
    ranks, rows = words.shape[:2]
    return _launch(
        triton_words.decode_mean, layout.block_bytes, 8 // layout.bits, rows * layout.num_blocks, words, out,
        rows * layout.row_bytes, len(out), layout.block_bytes, layout.num_blocks, layout.row_bytes,
        rows * layout.num_blocks, BITS=layout.bits, ALIGNED=_aligned(words, layout), RANKS=ranks,
    )  # fmt: skip


def _launch(kernel: Any, width: int, pieces: int, num_rows: int, *args: Tensor | float, **constants: int) -> None:
    """Launch a kernel on so many rows of this width; each row has so many pieces."""
    if not num_rows:
        return
    launch = launches.get(f"{kernel.__name__}{constants.get('BITS', '')}", Launch())
    columns = triton.next_power_of_2(width)
    rows = max(1, launch.elements // (columns * pieces))
    with torch.cuda.device_of(args[0]):
        kernel[(triton.cdiv(num_rows, rows),)](
            *args, **constants, ROWS=rows, COLS=columns, EVEN=columns == width, num_warps=launch.warps,
            enable_fp_fusion=False,
        )  # fmt: skip


def _aligned(words: Tensor, layout: Layout) -> bool:
    return layout.row_bytes % 4 == 0 and words.data_ptr() % 4 == 0
