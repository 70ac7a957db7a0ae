"""What each rank sends to each when slices are dealt and collected, in few parts however many tensors there are.

A network has many small tensors: biases, norms, statistics. Those of one dtype lie in one vector, so that what a rank
sends of all of them is one indexed copy. All indices of a round are moved to the device together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.exchange.pieces import Part, Piece, Run
from thinwire.exchange.shard_layout import ShardLayout
from thinwire.surgery.slices import UnitIndices, slice_shape

SMALL = 4096  # elements of the whole tensor; an index takes 8 bytes for each, so large ones are indexed by dimension
ALIGNED_ELEMENTS = 16  # kernels are slower on tensors that begin in mid-line
Parts = list[list[Part]]  # to, or from, each rank
Positions = Callable[[Piece], np.ndarray]  # of a piece's elements in a vector of small tensors


class SmallTensors:
    """Where small tensors of one dtype lie in one vector."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.size
            self.size += -(-torch.Size(shape).numel() // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors in a vector of this layout.

        Each has a version of its own (`data`). Otherwise a model that changes a buffer in its forward pass would change
        the version of every weight beside it, and autograd would refuse to go back.
        """
        return {
            name: vector[at : at + torch.Size(self.shapes[name]).numel()].view(self.shapes[name]).data
            for name, at in self.offsets.items()
        }

    def positions(self, name: str, index: Sequence[np.ndarray | None]) -> np.ndarray:
        """Where in the vector the elements of a slice of a tensor are."""
        found = np.array([self.offsets[name]])
        for dim, i in enumerate(index):
            stride = math.prod(self.shapes[name][dim + 1 :])
            along = np.arange(self.shapes[name][dim]) if i is None else i
            found = (found[:, None] + stride * along).reshape(-1)
        return found


def small_tensors(
    dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, Sequence[int]]
) -> dict[torch.dtype, SmallTensors]:
    """A layout for each dtype."""
    return {
        dtype: SmallTensors({name: shape for name, shape in shapes.items() if dtypes[name] == dtype})
        for dtype in dict.fromkeys(dtypes[name] for name in shapes)
    }


class Routes(NamedTuple):
    """The parts of all messages of a rank. Collecting takes the way of dealing back."""

    to_slices: Parts  # what this rank's shards have of the slices of each rank
    from_shards: Parts  # what this rank's slice has of the shards of each rank
    small: dict[torch.dtype, SmallTensors]  # of this rank's slice


def make_routes(
    layout: ShardLayout, units: Sequence[UnitIndices], rank: int, small: dict[torch.dtype, SmallTensors],
    device: torch.device,
) -> Routes:  # fmt: skip
    """The routes of a rank whose small tensors' shards lie as `small` says."""
    slices, ranks = layout.slices, range(layout.num_ranks)
    holders = {
        name: ()
        if slices.is_divided(name)
        else tuple(r for r in ranks if slices.slice_index(name, units[r]) is not None)
        for of in small.values()
        for name in of.offsets
    }
    indices = {name: slices.slice_index(name, units[rank]) for name in holders}
    shapes = {name: slice_shape(layout.shapes[name], index) for name, index in indices.items() if index is not None}
    in_slice = small_tensors(layout.dtypes, shapes)

    def in_shard(piece: Piece) -> np.ndarray:
        return small[piece.dtype].positions(piece.name, [None if i is None else i.numpy() for i in piece.slice_index])

    def in_own_slice(piece: Piece) -> np.ndarray:
        index: list[np.ndarray | None] = [None] * len(piece.shape)
        if piece.shape:
            index[piece.dim] = np.arange(piece.start, piece.start + piece.shape[piece.dim])
        return in_slice[piece.dtype].positions(piece.name, index)

    to_slices = [_in_runs(layout.pieces(units[to], rank), holders, in_shard) for to in ranks]
    from_shards = [_in_runs(layout.pieces(units[rank], source), holders, in_own_slice) for source in ranks]
    return Routes(*_on_device(to_slices, from_shards, device), in_slice)


def _in_runs(pieces: Sequence[Piece], holders: Mapping[str, tuple[int, ...]], positions: Positions) -> list[Part]:
    """Large pieces, and before them one run for all small ones of one dtype that the same ranks have."""
    runs: dict[tuple[torch.dtype, tuple[int, ...]], list[Piece]] = {}
    for piece in pieces:
        if piece.name in holders:
            runs.setdefault((piece.dtype, holders[piece.name]), []).append(piece)
    found: list[Part] = []
    for (dtype, _), of in runs.items():
        index = torch.from_numpy(np.concatenate([positions(piece) for piece in of]))
        found.append(Run(tuple(piece.name for piece in of), dtype, [len(index)], (index,)))
    return [*found, *(piece for piece in pieces if piece.name not in holders)]


def _on_device(to_slices: Parts, from_shards: Parts, device: torch.device) -> tuple[Parts, Parts]:
    """All indices on a device, moved in one copy."""
    parts = [part for some in (*to_slices, *from_shards) for part in some]
    indices = {id(i): i for part in parts for i in part.slice_index if i is not None}
    moved = torch.cat([*indices.values(), torch.zeros(0, dtype=torch.int64)]).to(device)
    known = dict(zip(indices, moved.split([len(i) for i in indices.values()] or [0]), strict=False))

    def move(some: list[Part]) -> list[Part]:
        return [
            part._replace(slice_index=tuple(None if i is None else known[id(i)] for i in part.slice_index))
            for part in some
        ]

    return [move(some) for some in to_slices], [move(some) for some in from_shards]
