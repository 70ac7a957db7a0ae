"""Pieces of many tensors, sent from every rank to every other in one all-to-all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.common.tensors import from_bytes, to_bytes
from thinwire.surgery.slices import SliceIndex

Pieces = Sequence[Sequence["Part"]]  # those to, or from, each rank


class Piece(NamedTuple):
    """What a rank's slice of a tensor and another rank's shard of it have in common."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    slice_index: SliceIndex = ()  # in the shard
    dim: int = 0  # in the slice: from `start` on, along this dimension
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view_in(self, slice_: Tensor) -> Tensor:
        """The piece as a view of the slice that it belongs to."""
        return slice_.narrow(self.dim, self.start, self.shape[self.dim]) if self.shape else slice_


class Run(NamedTuple):
    """The pieces of many small tensors, which lie in one vector."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: list[int]
    slice_index: SliceIndex  # in the vector of this rank's shards, or of its slice

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Part = Piece | Run


def pack_pieces(outgoing: Pieces, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The bytes of all pieces, one after the other; `tensors` gives them in order, and need not hold all at once."""
    buffer = torch.empty(sum(map(_num_bytes, outgoing)), dtype=torch.uint8, device=device)
    at = 0
    for piece, tensor in zip((piece for some in outgoing for piece in some), tensors, strict=True):
        assert tensor.dtype == piece.dtype, (piece, tensor.dtype)
        buffer[at : at + piece.num_bytes] = to_bytes(tensor)
        at += piece.num_bytes
    return buffer


def exchange_pieces(buffer: Tensor, outgoing: Pieces, expected: Pieces, comm: Comm) -> list[list[Tensor]]:
    """Send every rank its pieces, packed in the buffer; returns the pieces that are expected from each. Collective."""
    byte = torch.empty(1, dtype=torch.uint8, device=buffer.device)
    like = [byte.expand(_num_bytes(some)) for some in expected]
    received = comm.all_to_all(buffer.split([_num_bytes(some) for some in outgoing]), like)
    return [
        [
            from_bytes(data, piece.dtype, piece.shape)
            for data, piece in zip(part.split([p.num_bytes for p in some]), some, strict=True)
        ]
        for part, some in zip(received, expected, strict=True)
    ]


def _num_bytes(pieces: Sequence[Part]) -> int:
    return sum(piece.num_bytes for piece in pieces)
