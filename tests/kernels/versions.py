"""A version of the kernels against the eager one, bit by bit: python -m tests.kernels.versions triton cuda

On a CPU, Triton's interpreter takes the GPU's place: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import VERSIONS, Layout, eager, num_blocks

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "tiny": lambda x: x * torch.logspace(-45, -30, len(x)),  # denormal numbers too
    "zeros": lambda x: torch.where(torch.arange(len(x)) % 700 < 300, -0.0, x),
    "halves": lambda x: (torch.arange(len(x)) % 255 - 127) / 2,  # half to even
    "not finite": lambda x: x.index_fill(0, torch.tensor([0]), torch.nan).index_fill(
        0, torch.tensor([len(x) // 2]), -torch.inf
    ),
}
SHORT = [(1, 8, "plain"), (100, 64, "zeros"), (1100, 520, "plain"), (700, 64, "tiny"), (600, 256, "not finite")]
SIZES = [(1, 8), (100, 8), (1300, 64), (40000, 64), (40000, 256), (40000, 512), (1300, 520), (9000, 5000)]
ALL = [(count, block, kind) for (count, block), kind in itertools.product(SIZES, KINDS)]
COMPILED = [(5000, 512, "tiny"), (5100, 512, "zeros")]  # each with bits compiles a dozen functions
KEYS = (None, 12345, 2**32 - 5)


def compare(version: Any, device: str, cases: list[tuple[int, int, str]], bits_: Sequence[int] = (8, 4, 2)) -> None:
    """Every kernel for every case: number of elements, block, kind of values."""
    for count, block, kind in cases:
        x = KINDS[kind](torch.randn(count, generator=torch.Generator().manual_seed(count))).to(device)
        compare_codes(version, x, block)
        for bits in bits_:
            compare_words(version, x, bits, block)


def compare_codes(version: Any, x: Tensor, block: int) -> None:
    """Largest values, codes with given scales, and what they stand for."""
    (tops,) = both(version, "abs_max", x, block, out=[torch.empty(num_blocks(len(x), block), device=x.device)])
    given = [tops, torch.where(tops < torch.inf, tops, torch.nan), 0.5 * tops]
    for key, levels, scales in zip(KEYS, (127, 31, 1), given, strict=True):
        out = [torch.empty(x.shape, dtype=torch.int8, device=x.device), torch.empty_like(x)]
        codes, _ = both(version, "quantise", x, scales, levels, block, key, out=out)
        both(version, "quantise", x, scales, levels, block, key, out=[torch.empty_like(codes), None])
        for subtracted_from in (None, x):
            both(version, "dequantise", codes, scales, levels, block, subtracted_from, out=[torch.empty_like(x)])


def compare_words(version: Any, x: Tensor, bits: int, block: int) -> None:
    """Words in one row and in three, and what they stand for: one after the other, or the mean."""
    for rows, key in ((1, KEYS[1]), (3, None)):
        layout = Layout(num_blocks(len(x), rows * block) * block, bits, block)
        out = [torch.empty(rows, layout.row_bytes, dtype=torch.uint8, device=x.device), torch.empty_like(x)]
        words, _ = both(version, "encode", x, layout, key, out=out)
        if bits == 4:
            both(version, "encode", x, layout, key, out=[torch.empty_like(words), None])
        both(version, "decode_mean", words[None], layout, out=[torch.empty_like(x)])
        both(version, "decode_mean", words[:, None], layout, out=[torch.empty(layout.width - 3, device=x.device)])


def both(version: Any, name: str, *args: Any, out: list[Tensor | None]) -> list[Tensor]:
    """What the eager version writes; the other must write the same."""
    expected = [None if t is None else torch.empty_like(t) for t in out]
    getattr(eager, name)(*args, *expected)
    getattr(version, name)(*args, *out)
    for one, other in zip(expected, out, strict=True):
        assert one is None or torch.equal(_bits(one), _bits(other)), (name, args)  # type: ignore[arg-type]
    return [t for t in expected if t is not None]


def _bits(x: Tensor) -> Tensor:
    """As whole numbers, to tell zeros apart; every NaN is the same."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32) if x.is_floating_point() else x


if __name__ == "__main__":
    tested = importlib.import_module(VERSIONS[sys.argv[1]])
    if sys.argv[1] == "compiled":
        compare(tested, sys.argv[2], COMPILED, bits_=[4])
    else:
        compare(tested, sys.argv[2], SHORT if sys.argv[2] == "cpu" else ALL)
    print("the same to the bit")
