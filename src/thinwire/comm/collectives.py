"""Collectives made of those of a Comm: of JSON values, and of several tensors in one round trip."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.common.json_text import parse_json
from thinwire.common.tensors import flatten, unflatten
from thinwire.errors import RunError, one_line

MOST_BYTES = 2**27  # of one rank's JSON
SAME_VERSIONS = "Use the same version of thinwire on all ranks"


def all_gather_json(comm: Comm, value: Any, pad_bytes: int = 1024) -> list[Any]:
    """Every rank's JSON value on every rank. Ranks exchange text, never pickled objects.

    It is padded to whole kibibytes, so that the digits of a time or the length of a path do not change the count.
    """
    text = json.dumps(value).encode()
    length = int(comm.max(torch.tensor([-(-len(text) // pad_bytes) * pad_bytes])).item())
    if not len(text) <= length <= MOST_BYTES:
        raise RunError(f"a rank gives {length} bytes of JSON; possible: up to {MOST_BYTES}. {SAME_VERSIONS}")
    padded = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
    return [_parsed(rank, given) for rank, given in enumerate(comm.all_gather(padded))]


def _parsed(rank: int, given: Tensor) -> Any:
    try:
        return parse_json(bytes(given.tolist()))
    except ValueError as error:
        raise RunError(f"rank {rank} sent what is no JSON ({one_line(str(error))}). {SAME_VERSIONS}") from None


@torch.no_grad()
def coalesced(tensors: Sequence[Tensor], operation: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by what an operation makes of them, all of one dtype together: one round trip, not many."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        same = [t for t in tensors if t.dtype == dtype]
        for tensor, part in zip(same, unflatten(operation(flatten(same)), same), strict=True):
            tensor.copy_(part)
