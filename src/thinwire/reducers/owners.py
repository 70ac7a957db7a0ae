"""An all-reduce of packed words that cannot be summed on the wire.

Every rank owns a part of the vector: it receives all ranks' words of that part (all_to_all), combines them, and sends
the result to all (all_gather). The traffic is that of a ring, 2(n−1)/n of the payload if as many bits go back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels
from thinwire.codecs.base import Codec, even_blocks
from thinwire.comm.base import Comm
from thinwire.reducers.vectors import Averaged, Randomness


def coded_mean(
    x: Tensor, make_codec: Callable[[int], Codec], block: int, randomness: Randomness, comm: Comm
) -> Averaged:
    """Mean of vectors that travel as packed words; the owner of a part sends the mean of that part back, packed too.

    What the owner's rounding of the mean loses, times n, is part of the owner's error.
    """
    width = part_width(x.numel(), comm.size)
    block = even_blocks(width, block)
    codec = make_codec(block)
    width = -(-width // block) * block
    given = pad(x, (0, comm.size * width - x.numel())).view(comm.size, width)
    words = codec.encode(given, randomness.rounding_key(comm.rank, 1))
    mine = codec.decode(torch.stack(comm.all_to_all(words.unbind())), width).sum(0, keepdim=True).div_(comm.size)
    word = codec.encode(mine, randomness.rounding_key(comm.rank, 2))
    means = codec.decode(torch.stack(comm.all_gather(word[0])), width)

    def error() -> Tensor:
        lost = given - codec.decode(words, width)
        lost[comm.rank] += comm.size * (mine[0] - means[comm.rank])
        return lost.view(-1)[: x.numel()]

    return Averaged(means.view(-1)[: x.numel()], error)


def combine_codes(
    codes: Tensor, bits: int, combine: Callable[[Tensor], Tensor], bits_back: int, comm: Comm, signed: bool = True
) -> Tensor:
    """For each element, `combine` (one row for each rank → one row) of all ranks' small whole numbers, exactly."""
    width = part_width(codes.numel(), comm.size)
    given = pad(codes, (0, comm.size * width - codes.numel())).view(comm.size, width)
    received = torch.stack(comm.all_to_all(kernels.pack(given, bits).unbind()))
    mine = combine(kernels.unpack(received, bits, signed))
    back = torch.stack(comm.all_gather(kernels.pack(mine, bits_back)))
    return kernels.unpack(back, bits_back, signed).view(-1)[: codes.numel()]


def part_width(count: int, ranks: int) -> int:
    """Elements that each rank owns: equal parts, whole bytes.

    >>> part_width(100, 4), part_width(96, 4)
    (32, 24)
    """
    return -(-count // (8 * ranks)) * 8
