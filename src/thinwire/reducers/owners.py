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
    lost = randomness.new_error(x)
    words = codec.encode(x, comm.size, width, randomness.rounding_key(comm.rank, 1), lost)
    mine = codec.decode_mean(torch.stack(comm.all_to_all(words.unbind())), width)
    lost_here = randomness.new_error(mine)
    word = codec.encode(mine, 1, width, randomness.rounding_key(comm.rank, 2), lost_here)
    mean = codec.decode(torch.stack(comm.all_gather(word[0])), width, x.numel())

    def with_own_part(error: Tensor, here: Tensor) -> Tensor:
        own_part = error[comm.rank * width : (comm.rank + 1) * width]
        own_part += comm.size * here[: len(own_part)]
        return error

    if lost is not None and lost_here is not None:
        with_own_part(lost, lost_here)
        return Averaged(mean, lambda: lost)
    return Averaged(
        mean, lambda: with_own_part(x - codec.decode(words, width, x.numel()), mine - codec.decode(word, width, width))
    )


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
