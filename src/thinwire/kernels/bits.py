"""Numbers of 1, 2 or 4 bits packed into bytes, and unpacked."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Numbers of a few bits as bytes, along the last axis; its length must be a multiple of 8/bits.

    Of int32 numbers the bytes are int32 too.

    >>> pack(torch.tensor([1, -1, 0, 2], dtype=torch.int8), bits=4).tolist()
    [1, 47]
    """
    if bits >= 8:
        return codes.contiguous().view(torch.uint8)
    numbers = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes
    pieces = numbers.unflatten(-1, (8 // bits, -1)).unbind(-2)  # first half in the low bits, …
    packed: Tensor = pieces[0] & (2**bits - 1)
    for i, piece in enumerate(pieces[1:], 1):
        packed |= (piece & (2**bits - 1)) << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int, signed: bool = True) -> Tensor:
    """What `pack` packed.

    >>> unpack(pack(torch.tensor([1, -1, 0, 2], dtype=torch.int8), bits=4), bits=4).tolist()
    [1, -1, 0, 2]
    """
    if bits >= 8:
        return packed.contiguous().view(torch.int8 if bits == 8 else torch.int16)
    packed = packed.view(torch.int8)
    codes = torch.stack([packed << (8 - bits * (i + 1)) for i in range(8 // bits)], -2).flatten(-2)
    codes >>= 8 - bits  # and with it the sign
    return codes if signed else codes & (2**bits - 1)
