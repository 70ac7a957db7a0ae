"""The kernels that benchmarks/kernels.py measures, with their inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import Layout

RANKS, KEY, LEVELS, BLOCK = 4, 12345, 31, 512
BLOCKS = {8: 512, 4: 256, 2: 64}  # as maxnorm has them

Run = Callable[[], object]


class Case(NamedTuple):
    """A kernel: what it is called in Triton's table of launches, bytes that it moves, and one run for each buffer."""

    launch: str
    num_bytes: float
    runs: list[Run]


def cases(version: Any, count: int, num_buffers: int, device: str) -> Iterator[tuple[str, Case]]:
    """Every kernel with outputs in buffers that are reused; each is made when it is asked for."""
    generator = torch.Generator(device).manual_seed(0)
    xs = [torch.randn(count, device=device, generator=generator) for _ in range(num_buffers)]
    outs = [torch.empty_like(x) for x in xs]
    codes = [torch.empty(count, dtype=torch.int8, device=device) for _ in xs]
    scales = [torch.empty(-(-count // BLOCK), device=device) for _ in xs]
    some = 4 * len(scales[0])

    def case(launch: str, num_bytes: float, run: Callable[[int], object]) -> Case:
        return Case(launch, num_bytes, [functools.partial(run, i) for i in range(num_buffers)])

    yield "abs-max", case("abs_max", 4 * count + some, lambda i: version.abs_max(xs[i], BLOCK, scales[i]))
    for key, error in ((KEY, False), (None, True)):
        yield "quantise 8" + with_error(error), case(
            "quantise" if error else "quantise random", count * (9 if error else 5) + some,
            lambda i, key=key, error=error: version.quantise(
                xs[i], scales[i], LEVELS, BLOCK, key, codes[i], outs[i] if error else None
            ),
        )  # fmt: skip
    yield "dequantise 8", case(
        "dequantise", 5 * count + some,
        lambda i: version.dequantise(codes[i], scales[i], LEVELS, BLOCK, None, outs[i]),
    )  # fmt: skip
    yield "what 8 bits lost", case(
        "dequantise", 9 * count + some,
        lambda i: version.dequantise(codes[i], scales[i], LEVELS, BLOCK, xs[i], outs[i]),
    )  # fmt: skip
    for bits in BLOCKS:
        yield from word_cases(version, bits, xs, outs, case)


def word_cases(
    version: Any, bits: int, xs: list[Tensor], outs: list[Tensor], case: Callable[..., Case]
) -> Iterator[tuple[str, Case]]:
    count, device = xs[0].numel(), xs[0].device
    layout = Layout(count // RANKS, bits, BLOCKS[bits])
    words = [torch.empty(RANKS, layout.row_bytes, dtype=torch.uint8, device=device) for _ in xs]
    for x, own in zip(xs, words, strict=True):  # `received` is a copy of them
        version.encode(x, layout, KEY, own, None)
    num_bytes = words[0].numel()
    for key, error in ((KEY, False), (None, True)):
        yield f"pack {bits}" + with_error(error), case(
            f"encode{bits}" + ("" if error else " random"), count * (8 if error else 4) + num_bytes,
            lambda i, key=key, error=error: version.encode(
                xs[i], layout, key, words[i], outs[i] if error else None
            ),
        )  # fmt: skip
    yield (
        f"unpack {bits}",
        case(
            f"decode_mean{bits}", num_bytes + 4 * count, lambda i: version.decode_mean(words[i][None], layout, outs[i])
        ),
    )
    received = [torch.stack([words[(i + j) % len(words)] for j in range(RANKS)]) for i in range(len(words))]
    yield f"unpack {bits} + accumulate", case(
        f"decode_mean{bits}", RANKS * num_bytes + 4 * count,
        lambda i: version.decode_mean(received[i], layout, outs[i]),
    )  # fmt: skip


def with_error(error: bool) -> str:
    return " + error feedback" if error else ""
