"""Quantise and dequantise vectors, block by block; and vectors as words: packed codes with their scales.

The work is done by one of the versions: see dispatch.py. Results are new tensors; those that only error feedback needs
are written where the caller says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.common.dtypes import as_reals
from thinwire.kernels.dispatch import call_kernel
from thinwire.kernels.passes import Layout


def abs_max(x: Tensor, block: int) -> Tensor:
    """Largest absolute value of each block, clamped as `clamp_scales` does; inf where a value is not finite.

    >>> abs_max(torch.tensor([1.0, -3.0, 2.0]), block=2)
    tensor([3., 2.])
    """
    out = torch.empty(num_blocks(x.numel(), block), device=x.device)
    call_kernel("abs_max", x.device, x, block, out)
    return out


def quantise(
    x: Tensor, scales: Tensor, levels: int, block: int, key: int | None, error: Tensor | None = None
) -> Tensor:
    """q = x·levels/scale rounded at random to a neighbouring whole number, E[q] = x·levels/scale; int8.

    The random numbers are a hash of key and position; without a key, the nearest whole number is taken. Values beyond
    the scale become ±levels. `error`, if given, becomes x − dequantise(q), in the same pass.

    >>> quantise(torch.tensor([1.0, -3.0, 0.0]), torch.tensor([3.0]), levels=3, block=4, key=0)
    tensor([ 1, -3,  0], dtype=torch.int8)
    """
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    call_kernel("quantise", x.device, x, scales, levels, block, key, out, error)
    return out


def dequantise(codes: Tensor, scales: Tensor, levels: int, block: int) -> Tensor:
    """q·scale/levels.

    Each element is rounded once, so that every version and every rank gets the same.

    >>> dequantise(torch.tensor([1, -3, 0], dtype=torch.int8), torch.tensor([3.0]), levels=3, block=4)
    tensor([ 1., -3.,  0.])
    """
    out = torch.empty(codes.shape, device=codes.device)
    call_kernel("dequantise", codes.device, codes, scales, levels, block, None, out)
    return out


def quantisation_error(x: Tensor, codes: Tensor, scales: Tensor, levels: int, block: int) -> Tensor:
    """x − dequantise(codes): what error feedback keeps, in one pass.

    >>> codes = torch.tensor([1], dtype=torch.int8)
    >>> quantisation_error(torch.tensor([1.5]), codes, torch.tensor([3.0]), levels=3, block=4)
    tensor([0.5000])
    """
    out = torch.empty(x.shape, device=x.device)
    call_kernel("dequantise", x.device, codes, scales, levels, block, x, out)
    return out


def encode(x: Tensor, num_rows: int, layout: Layout, key: int | None, error: Tensor | None = None) -> Tensor:
    """A vector as rows of words: scales, then packed codes, as `quantise` makes them of each block's own largest value.

    Without a key, 2 bits stand for −2, −1, 0 and 1 steps of −⅜ of the block's largest value, sign included; the error
    of a value is never larger than the value. The vector is filled up with zeros. `error`, if given, becomes what the
    words lose, in the same pass; NaN in blocks with a value that is not finite.

    >>> encode(torch.tensor([7.0, -1.0]), 1, Layout(width=8, bits=4, block=8), key=None).tolist()
    [[0, 0, 224, 64, 7, 15, 0, 0]]
    """
    out = torch.empty(num_rows, layout.row_bytes, dtype=torch.uint8, device=x.device)
    call_kernel("encode", x.device, x, layout, key, out, error)
    return out


def decode(words: Tensor, layout: Layout, count: int) -> Tensor:
    """The first elements of a vector that rows of words stand for.

    >>> layout = Layout(width=8, bits=4, block=8)
    >>> decode(encode(torch.tensor([7.0, -1.0]), 1, layout, key=None), layout, count=2)
    tensor([ 7., -1.])
    """
    return decode_mean(words[None], layout, count)


def decode_mean(words: Tensor, layout: Layout, count: int) -> Tensor:
    """As `decode`, the mean over the first axis of [rank, row, byte], added up in the order of ranks."""
    out = torch.empty(count, device=words.device)
    call_kernel("decode_mean", words.device, words.contiguous(), layout, out)
    return out


def all_finite(x: Tensor) -> Tensor:
    """Whether no value is NaN or infinite, as a tensor; isfinite().all() takes fifteen times as long on a CPU.

    >>> all_finite(torch.tensor([1.0, -2.0])).item(), all_finite(torch.tensor([1.0, torch.nan])).item()
    (True, False)
    """
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(as_reals(x))
    return low.isfinite() & high.isfinite()


def all_finite_in(tensors: Sequence[Tensor]) -> Tensor:
    """Whether no value of any tensor is NaN or infinite, as a tensor; on a GPU in a few launches for all of them.

    >>> all_finite_in([torch.ones(2), torch.tensor([torch.inf])]).item()
    False
    """
    if tensors[0].is_cuda:
        sizes = torch._foreach_norm([as_reals(t) for t in tensors if t.numel()], torch.inf)
        return torch.stack([size.float() for size in sizes]).isfinite().all() if sizes else all_finite(tensors[0])
    ends = [end for t in tensors if t.numel() for end in torch.aminmax(as_reals(t))]
    return torch.stack(ends).isfinite().all() if ends else all_finite(tensors[0])


def num_blocks(count: int, block: int) -> int:
    """Blocks that so many elements fill, the last one perhaps in part."""
    return -(-count // block)
