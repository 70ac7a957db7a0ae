"""One bit each way: the sign that most ranks have."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.base import Comm
from thinwire.kernels.hashing import uniform
from thinwire.reducers.base import Block, Reducer, ReducerState
from thinwire.reducers.owners import combine_codes
from thinwire.reducers.vectors import Averaged, Randomness, on_vectors


def sign(
    block: Block = 512,  # elements that share a magnitude; lower = finer, 32/block more bits per element
) -> Reducer:
    """The sign that most ranks have, times the mean magnitude of the scale block.

    out = (mean over ranks and block of |g|)·majority(sign gᵢ); a coin decides where votes are equal. Signs go to the
    rank that owns their part, the majority comes back. Wire bytes per rank: 2(n−1)/n·(P/8 + 4⌈P/block⌉). Not the mean
    of anything: the error is what a rank gave less its own sign times the size.

    Wire: 1 bit per element; does not sum on the wire.

    Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019.
    """

    def average(x: Tensor, randomness: Randomness, state: ReducerState, comm: Comm) -> Averaged:
        width = min(block, x.numel())
        count = kernels.num_blocks(x.numel(), width)
        filled = torch.nn.functional.pad(x.abs(), (0, count * width - x.numel())).view(count, width).sum(1)
        size = comm.mean(filled)
        size[:-1] /= width
        size[-1] /= x.numel() - (count - 1) * width
        negative = (x < 0).to(torch.int8)

        def majority(votes: Tensor) -> Tensor:
            against = 2 * votes.sum(0) - comm.size
            coin = uniform(votes.shape[1], randomness.key(comm.rank), x.device) < 0.5
            return torch.where(against == 0, coin, against > 0).to(torch.int8)

        voted = combine_codes(negative, 1, majority, 1, comm, signed=False)
        mean = kernels.dequantise(1 - 2 * voted, size, 1, width)
        return Averaged(mean, lambda: kernels.quantisation_error(x, 1 - 2 * negative, size, 1, width))

    return on_vectors(average)
