"""Random numbers without a generator: a hash of where a number is used. The same everywhere, and nothing to save."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

MULTIPLIER = 0x9E3779B1 - 2**32  # odd, so that multiplying loses nothing; as a signed 32-bit number
# A hash times this is between −½ and ½, and by so much less that adding it to a whole number up to 127 never
# reaches the next half: what is a whole number of steps stays so.
DITHER = 2.0**-32 * (1 - 2.0**-15)


def hash_(numbers: Tensor) -> Tensor:
    """Well-mixed 32-bit numbers for int32 numbers, changed in place: two rounds of multiply and shift."""
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        numbers ^= (numbers >> shift) & (2 ** (32 - shift) - 1)
        numbers *= multiplier
    numbers ^= (numbers >> 16) & 0xFFFF
    return numbers


@functools.lru_cache(maxsize=64)
def position_hashes(count: int, device: torch.device) -> Tensor:
    """One hash for each position in a block. Computed on the CPU: then no stream of a GPU can read it too early."""
    return hash_(torch.arange(1, count + 1, dtype=torch.int32)).to(device)


def block_hashes(count: int, key: int, device: torch.device) -> Tensor:
    """One hash for each block; other keys (of 32 bits) give other hashes."""
    return hash_(hash_(torch.arange(1, count + 1, dtype=torch.int32, device=device)).bitwise_xor_(signed(key)))


def uniform(count: int, key: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), in double precision.

    >>> uniform(4, 1, torch.device("cpu")).tolist() == uniform(4, 1, torch.device("cpu")).tolist()
    True
    """
    return block_hashes(count, key, device).double().mul_(2.0**-32).add_(0.5)


def signed(key: int) -> int:
    """The 32 bits of a key as a signed number."""
    return (key & 0xFFFFFFFF) - (key & 0x80000000) * 2
