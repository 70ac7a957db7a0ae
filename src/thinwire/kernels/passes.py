"""Formulas on matrices as passes over vectors: in portions, and the last, short block by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels.hashing import block_hashes, position_hashes

SCALE_BYTES = 4


class Layout(NamedTuple):
    """Rows of words: how many elements a row has, in how many bits, and how many of them share a scale."""

    width: int  # a multiple of the block
    bits: int
    block: int  # a multiple of 8

    @property
    def num_blocks(self) -> int:
        """Scale blocks in a row."""
        return self.width // self.block

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of a block."""
        return self.block * self.bits // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: its scales, then its codes."""
        return self.num_blocks * (SCALE_BYTES + self.block_bytes)


class Formulas(Protocol):
    """The functions of `formulas`, as they are or compiled."""

    abs_max: Any
    two_bit_steps: Any
    quantise: Any
    dequantise: Any
    encode: Any
    decode_mean: Any


class Passes:
    """The kernels on vectors, made of formulas on matrices with a scale block per row.

    `portion` is how many elements a CPU computes with at a time, 0 for all; a GPU takes all at once. `whole` is the
    type of codes before they are stored.
    """

    def __init__(self, formulas: Formulas, portion: int, whole: torch.dtype) -> None:
        self.formulas = formulas
        self.portion = portion
        self.whole = whole

    def abs_max(self, x: Tensor, block: int, out: Tensor) -> None:
        """Largest absolute value of each block, clamped as `clamp_scales` does; inf where a value is not finite."""
        for rows, values in self._matrices(block, x):
            self.formulas.abs_max(values, out[rows])

    def quantise(
        self, x: Tensor, scales: Tensor, levels: int, block: int, key: int | None, codes: Tensor, error: Tensor | None
    ) -> None:
        """codes = x·levels/scale, rounded at random with a key, else to the nearest; error = x − codes·scale/levels."""
        hashes = None if key is None else block_hashes(len(scales), key, x.device)
        for rows, values, numbers, errors in self._matrices(block, x, codes, error):
            dither = None if hashes is None else (hashes[rows], position_hashes(values.shape[1], x.device))
            self.formulas.quantise(values, scales[rows], dither, float(levels), self.whole, numbers, errors)

    def dequantise(
        self, codes: Tensor, scales: Tensor, levels: int, block: int, given: Tensor | None, out: Tensor
    ) -> None:
        """codes·scale/levels, or given − codes·scale/levels."""
        for rows, numbers, values, results in self._matrices(block, codes, given, out):
            self.formulas.dequantise(numbers, scales[rows], float(levels), values, results)

    def encode(self, x: Tensor, layout: Layout, key: int | None, words: Tensor, error: Tensor | None) -> None:
        """Rows of words for a vector, which is filled up with zeros, and what they lose."""
        scales = torch.empty(len(words) * layout.num_blocks, device=x.device)
        hashes = None if key is None else block_hashes(len(scales), key, x.device)
        positions = position_hashes(layout.block, x.device)
        find_scales = self.formulas.two_bit_steps if layout.bits == 2 and key is None else self.formulas.abs_max
        for blocks, packed in self._packed(words[None], layout, len(x)):
            values = _whole_blocks(x, blocks, layout.block)
            lost = None if error is None else _whole_blocks(error, blocks, layout.block)
            dither = None if hashes is None else (hashes[blocks], positions)
            find_scales(values, scales[blocks])
            self.formulas.encode(values, scales[blocks], dither, layout.bits, self.whole, packed[0], lost)
            if error is not None and lost is not None:
                _keep(lost, error, blocks, layout.block)
        words[:, : SCALE_BYTES * layout.num_blocks] = scales.view(torch.uint8).view(len(words), -1)

    def decode_mean(self, words: Tensor, layout: Layout, out: Tensor) -> None:
        """The mean over ranks of words [rank, row, byte], as a vector, which may end early."""
        head = words[:, :, : SCALE_BYTES * layout.num_blocks].clone(memory_format=torch.contiguous_format)  # aligned
        scales = head.view(len(words), -1).view(torch.float32)
        for blocks, packed in self._packed(words, layout, len(out)):
            values = _whole_blocks(out, blocks, layout.block)
            self.formulas.decode_mean(packed, scales[:, blocks], layout.bits, values)
            _keep(values, out, blocks, layout.block)

    def _matrices(self, block: int, *vectors: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Portions of vectors as matrices of whole blocks, and the rest as a row; first, which blocks they are."""
        count = next(len(v) for v in vectors if v is not None)
        whole = count // block
        for rows in self._portions(slice(0, whole), block, vectors[0]):
            part = slice(rows.start * block, rows.stop * block)
            yield (rows, *(None if v is None else v[part].view(-1, block) for v in vectors))
        if count % block:
            rest = slice(whole * block, None)
            yield (slice(whole, None), *(None if v is None else v[rest].view(1, -1) for v in vectors))

    def _packed(self, words: Tensor, layout: Layout, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Portions of words [rank, row, byte]: which blocks of the vector, and their codes [rank, block, byte].

        A portion has whole blocks of a vector with so many elements, or only such as are not full.
        """
        for row in range(words.shape[1]):
            codes = words[:, row, SCALE_BYTES * layout.num_blocks :].unflatten(1, (layout.num_blocks, -1))
            first, end = row * layout.num_blocks, (row + 1) * layout.num_blocks
            full = min(max(count // layout.block, first), end)
            for blocks in self._portions(slice(first, full), layout.block, words):
                yield blocks, codes[:, blocks.start - first : blocks.stop - first]
            if full < end:
                yield slice(full, end), codes[:, full - first :]

    def _portions(self, blocks: slice, block: int, x: Tensor | None) -> Iterator[slice]:
        limited = x is not None and x.device.type == "cpu" and self.portion
        step = max(1, self.portion // block) if limited else max(1, blocks.stop - blocks.start)
        return (slice(i, min(i + step, blocks.stop)) for i in range(blocks.start, blocks.stop, step))


def _whole_blocks(x: Tensor, blocks: slice, block: int) -> Tensor:
    """Blocks of a vector as a matrix; a copy, filled up with zeros, if the vector ends in them."""
    count = (blocks.stop - blocks.start) * block
    part = x[blocks.start * block : blocks.stop * block]
    return (part if len(part) == count else pad(part, (0, count - len(part)))).view(-1, block)


def _keep(values: Tensor, x: Tensor, blocks: slice, block: int) -> None:
    """Write what `_whole_blocks` returned back, if it was a copy."""
    if blocks.stop * block > len(x):
        x[blocks.start * block :] = values.view(-1)[: max(0, len(x) - blocks.start * block)]
