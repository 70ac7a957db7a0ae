"""Half precision on the wire."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.reducers.base import Reducer, ReducerState
from thinwire.reducers.vectors import Averaged, Randomness, on_vectors


def fp16() -> Reducer:
    """Gradients as float16: 11 significant bits, from 6·10⁻⁸ to 65504.

    out = Σᵢ fp16(gᵢ/n).  Wire bytes per rank: 2(n−1)/n · 2P. What is too large becomes inf, on all ranks; what is too
    small, zero: prefer bf16 unless a loss scale is in use. As with bf16, sums are rounded on the way.

    Wire: 16 bits per element; sums on the wire.
    """
    return _half(torch.float16)


def bf16() -> Reducer:
    """Gradients as bfloat16: 8 significant bits, the range of float32.

    out = Σᵢ bf16(gᵢ/n).  Wire bytes per rank: 2(n−1)/n · 2P. The sums are rounded on the way, too: no rank knows by how
    much, so error_feedback cannot make up for that part.

    Wire: 16 bits per element; sums on the wire.
    """
    return _half(torch.bfloat16)


def _half(dtype: torch.dtype) -> Reducer:
    def average(x: Tensor, randomness: Randomness, state: ReducerState, comm: Comm) -> Averaged:
        sent = (x / comm.size).to(dtype)  # before the sum, which then cannot overflow
        return Averaged(comm.sum(sent).float(), lambda: x - sent.float() * comm.size)

    return on_vectors(average)
