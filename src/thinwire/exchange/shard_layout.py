"""Which elements of a sharded tensor lie on which rank. It follows from shapes alone, so no index is ever sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.exchange.pieces import Piece
from thinwire.surgery.slices import Slices, UnitIndices, slice_shape


class ShardLayout:
    """Each tensor is split along its longest dimension, in equal parts; rank 0 keeps tensors without dimensions."""

    def __init__(self, slices: Slices, num_ranks: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self.slices, self.num_ranks, self.dtypes = slices, num_ranks, dict(dtypes)
        self.shapes = {name: tuple(slices.tensors[name].shape) for name in dtypes}
        self.dims = {name: shape.index(max(shape)) for name, shape in self.shapes.items() if shape}  # split along

    @property
    def num_bytes(self) -> int:
        """Of all tensors, on all ranks together."""
        return sum(torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def shard_shape(self, name: str, rank: int) -> list[int]:
        """The shape of a rank's shard."""
        begin, end = self._bounds(name, rank)
        if name not in self.dims:
            return [] if end else [0]
        return [end - begin if d == self.dims[name] else length for d, length in enumerate(self.shapes[name])]

    def shard_of(self, tensor: Tensor, name: str, rank: int) -> Tensor:
        """A rank's shard of a whole tensor, as a view."""
        begin, end = self._bounds(name, rank)
        if name not in self.dims:
            return tensor if end else tensor.new_zeros(0)
        return tensor.narrow(self.dims[name], begin, end - begin)

    def whole_shard(self, name: str, rank: int) -> Piece:
        """All of a rank's shard as one piece."""
        return Piece(name, self.dtypes[name], self.shard_shape(name, rank))

    def pieces(self, units: UnitIndices, rank: int) -> list[Piece]:
        """What the slice of these units has of the shards of a rank."""
        found = []
        known: dict[tuple[int, int, int], tuple[int, Tensor]] = {}  # many tensors have the same units
        for name, dtype in self.dtypes.items():
            index = self.slices.slice_index(name, units)
            begin, end = self._bounds(name, rank)
            if index is None or begin == end:
                continue
            if name not in self.dims:
                found.append(Piece(name, dtype, [], index))
                continue
            dim = self.dims[name]
            chosen = index[dim]
            here = list(index)
            start = begin
            if chosen is not None:
                if (id(chosen), begin, end) not in known:
                    first, stop = torch.searchsorted(chosen, torch.tensor([begin, end])).tolist()
                    known[id(chosen), begin, end] = first, chosen[first:stop] - begin
                start, here[dim] = known[id(chosen), begin, end]
            shape = slice_shape(self.shard_shape(name, rank), tuple(here))
            found.append(Piece(name, dtype, shape, tuple(here), dim, start))
        return found

    def _bounds(self, name: str, rank: int) -> tuple[int, int]:
        """From where to where a rank's shard reaches along the dimension that is split."""
        if name not in self.dims:
            return 0, int(rank == 0)
        length = self.shapes[name][self.dims[name]]
        return length * rank // self.num_ranks, length * (rank + 1) // self.num_ranks
