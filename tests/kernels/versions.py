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
from thinwire.kernels.hashing import DITHER, MULTIPLIER, block_hashes, position_hashes

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "tiny": lambda x: x * torch.logspace(-45, -30, len(x)),  # denormal numbers too
    "zeros": lambda x: torch.where(torch.arange(len(x)) % 700 < 300, -0.0, x),
    "halves": lambda x: (torch.arange(len(x)) % 255 - 127) / 2,  # half to even
    "halves of 127": lambda x: (torch.arange(len(x)) % 509 - 254) / 2,  # steps are ones if a block has a 127
    "halves of 7": lambda x: (torch.arange(len(x)) % 29 - 14) / 2,
    "halves of 1": lambda x: (torch.arange(len(x)) % 5 - 2) / 2,
    "halves of two-bit steps": lambda x: torch.where(
        _every(8, x), 8 * _signs(x), (torch.arange(len(x)) % 11 - 5) * 1.5
    ),
    "edges": lambda x: torch.where(x > 0, 1, -1) * _for_blocks(x, 1 + torch.rand(len(x))),  # each value is ±scale
    "huge": lambda x: (
        torch.where(x > 0, 1, -1) * _for_blocks(x, 2.0**127 * (1 + torch.rand(len(x)))).clamp(max=LARGEST)
    ),
    "not finite": lambda x: x.index_fill(0, torch.tensor([0]), torch.nan).index_fill(
        0, torch.tensor([len(x) // 2]), -torch.inf
    ),
    "each": lambda x: torch.cat([f(part) for part, f in zip(x.split(3072), itertools.cycle(OTHERS), strict=False)]),
}
OTHERS = [KINDS[kind] for kind in KINDS if kind != "each"]
LARGEST = torch.finfo(torch.float32).max
HARDEST = float.fromhex("0x1.d29684p127")  # the scale for which rounding errors add most to 127 steps
SHORT = [(1, 8, "plain"), (100, 64, "zeros"), (1100, 520, "plain"), (700, 24, "tiny"), (600, 256, "not finite")]
LONG = {8: (30000, 512, "each"), 4: (30000, 256, "each"), 2: (30000, 64, "each")}  # by bits; tiles are full
SIZES = [(1, 8), (100, 8), (1300, 64), (40000, 64), (40000, 256), (40000, 512), (1300, 520), (9000, 5000)]
ALL = [(count, block, kind) for (count, block), kind in itertools.product(SIZES, KINDS)]
COMPILED = [(5000, 512, "tiny"), (5100, 512, "zeros")]  # each with bits compiles a dozen functions
KEYS = (None, 12345, 2**32 - 5)


def compare(version: Any, device: str, cases: list[tuple[int, int, str]], bits_: Sequence[int] = (8, 4, 2)) -> None:
    """Every kernel for every case: number of elements, block, kind of values."""
    for count, block, kind in cases:
        torch.manual_seed(count)
        x = KINDS[kind](torch.randn(count)).to(device)
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
    for rows, key in itertools.product((1, 3), KEYS[:2]):
        layout = Layout(num_blocks(len(x), rows * block) * block, bits, block)
        out = [torch.empty(rows, layout.row_bytes, dtype=torch.uint8, device=x.device), torch.empty_like(x)]
        words, _ = both(version, "encode", x, layout, key, out=out)
        if bits == 4 or "compiled" not in version.__name__:  # which takes long
            both(version, "encode", x, layout, key, out=[torch.empty_like(words), None])
        both(version, "decode_mean", words[None], layout, out=[torch.empty_like(x)])
        both(version, "decode_mean", words[:, None], layout, out=[torch.empty(layout.width - 3, device=x.device)])


def compare_any_words(version: Any, device: str) -> None:
    """Means of words that nobody encoded: every code, and scales that are negative, NaN, denormal, 0 or −0."""
    for ranks, bits, block in itertools.product((1, 2, 3, 4, 5), (8, 4, 2), (24, 64)):
        layout = Layout(5000 // block * block, bits, block)
        words = torch.randint(0, 256, (ranks, 1, layout.row_bytes), dtype=torch.uint8)
        scales = torch.randn(ranks, layout.num_blocks) * 2.0 ** torch.randint(-149, 120, (ranks, layout.num_blocks))
        scales[:, ::7], scales[:, 1::7], scales[:, 2::7] = 0.0, -0.0, torch.nan
        words[:, 0, : 4 * layout.num_blocks] = scales.view(torch.uint8)
        both(version, "decode_mean", words.to(device), layout, out=[torch.empty(layout.width - 3, device=device)])


def compare_clamped(version: Any, device: str) -> None:
    """127 steps that are a little more than that after rounding errors, and dither that makes 128 of some."""
    x = torch.full((200 * 512,), HARDEST, device=device)
    dither = block_hashes(200, KEYS[1], x.device)[:, None] ^ position_hashes(512, x.device)
    dithered = HARDEST * (1 / x[0] * 127) + dither.mul_(MULTIPLIER) * DITHER
    assert (dithered.round() == 128).any()
    layout = Layout(len(x), 8, 512)
    out = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=device)
    both(version, "encode", x, layout, KEYS[1], out=[out, torch.empty_like(x)])


def both(version: Any, name: str, *args: Any, out: list[Tensor | None]) -> list[Tensor]:
    """What the eager version writes; the other must write the same."""
    expected = [None if t is None else torch.empty_like(t) for t in out]
    getattr(eager, name)(*args, *expected)
    getattr(version, name)(*args, *out)
    for one, other in zip(expected, out, strict=True):
        assert one is None or torch.equal(_bits(one), _bits(other)), (name, args)  # type: ignore[arg-type]
    return [t for t in expected if t is not None]


def _every(step: int, x: Tensor) -> Tensor:
    return torch.arange(len(x)) % step == 0


def _signs(x: Tensor) -> Tensor:
    """1 or −1, for whole blocks and parts of them."""
    return torch.where(_for_blocks(x, x) > 0, 1.0, -1.0)


def _for_blocks(x: Tensor, values: Tensor) -> Tensor:
    """The same value for 64 elements, so for whole blocks and parts of them."""
    return values[torch.arange(len(x)) // 64]


def _bits(x: Tensor) -> Tensor:
    """As whole numbers, to tell zeros apart; every NaN is the same."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32) if x.is_floating_point() else x


if __name__ == "__main__":
    tested = importlib.import_module(VERSIONS[sys.argv[1]])
    if sys.argv[1] == "compiled":
        compare(tested, sys.argv[2], COMPILED, bits_=[4])
    else:
        compare(tested, sys.argv[2], SHORT if sys.argv[2] == "cpu" else ALL)
        for bits in LONG:
            compare(tested, sys.argv[2], [LONG[bits]], [bits])
        compare_any_words(tested, sys.argv[2])
        compare_clamped(tested, sys.argv[2])
    print("the same to the bit")
