"""Collectives made of those of a Comm: of JSON values, and of several tensors in one round trip."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.common.tensors import flatten, unflatten


def all_gather_json(comm: Comm, value: Any, pad_bytes: int = 1024) -> list[Any]:
    """Every rank's JSON value on every rank. Ranks exchange text, never pickled objects.

    It is padded to whole kibibytes, so that the digits of a time or the length of a path do not change the count.
    """
    text = json.dumps(value).encode()
    length = int(comm.max(torch.tensor([-(-len(text) // pad_bytes) * pad_bytes])).item())
    padded = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
    return [json.loads(bytes(t.tolist())) for t in comm.all_gather(padded)]


@torch.no_grad()
def coalesced(tensors: Sequence[Tensor], operation: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by what an operation makes of them, all of one dtype together: one round trip, not many."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        same = [t for t in tensors if t.dtype == dtype]
        for tensor, part in zip(same, unflatten(operation(flatten(same)), same), strict=True):
            tensor.copy_(part)
