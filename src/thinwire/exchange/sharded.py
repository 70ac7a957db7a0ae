"""A network of which every rank keeps a shard; narrow networks are made from it, and collected again.

`deal` and `collect` are the two halves of a round of independent subnet training. A rank's slice of the network comes
from the shards of all ranks in one all-to-all, and goes back in another; no rank holds the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.common.packing import groups_within
from thinwire.common.tensors import num_bytes
from thinwire.exchange.pieces import Piece, exchange_pieces, pack_pieces
from thinwire.exchange.shard_layout import ShardLayout
from thinwire.surgery.slices import Slices, UnitIndices, put_slice, slice_shape, take_slice


class Contribution(NamedTuple):
    """What a rank has done to the slice that it sends back."""

    steps: float  # that it trained for
    seconds: float  # that this took


CONTRIBUTION = Piece("", torch.float64, [len(Contribution._fields)])


class ShardedTensors:
    """Tensors that are spread over all ranks; `shards` has this rank's part of each."""

    def __init__(
        self,
        slices: Slices,
        comm: Comm,
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
        fill_value: float = 0.0,
    ) -> None:
        self.slices, self.comm, self.device = slices, comm, device
        self.fill_value = fill_value
        self.layout = ShardLayout(slices, comm.size, dtypes)
        self.shards = {
            name: torch.full(self.layout.shard_shape(name, comm.rank), fill_value, dtype=dtype, device=device)
            for name, dtype in dtypes.items()
        }

    @property
    def num_bytes(self) -> int:
        """Of the whole tensors."""
        return self.layout.num_bytes

    def copy(self) -> ShardedTensors:
        """A copy, to collect into without changing these."""
        other = ShardedTensors.__new__(ShardedTensors)
        other.__dict__ |= self.__dict__ | {"shards": {name: shard.clone() for name, shard in self.shards.items()}}
        return other

    def load_shards(self, shards: Mapping[str, Tensor]) -> None:
        """Go on from this rank's shards of a saved state."""
        for name, shard in self.shards.items():
            shard.copy_(shards[name])

    def shard_of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's shard of a whole tensor."""
        return self.layout.shard_of(tensor, name, self.comm.rank)

    # ---- slices

    @torch.no_grad()
    def deal(self, units: Sequence[UnitIndices]) -> dict[str, Tensor]:
        """This rank's slice of every tensor, given the units of each rank. Collective."""
        rank, ranks = self.comm.rank, range(self.comm.size)
        outgoing = [self.layout.pieces(units[to], rank) for to in ranks]
        expected = [self.layout.pieces(units[rank], source) for source in ranks]
        tensors = (take_slice(self.shards[p.name], p.slice_index) for pieces in outgoing for p in pieces)
        received = exchange_pieces(pack_pieces(outgoing, tensors, self.device), outgoing, expected, self.comm)
        slice_: dict[str, Tensor] = {}
        for name, shape in self.layout.shapes.items():
            index = self.slices.slice_index(name, units[rank])
            if index is not None:
                dtype = self.layout.dtypes[name]
                slice_[name] = torch.empty(slice_shape(shape, index), dtype=dtype, device=self.device)
        for pieces, data_of_pieces in zip(expected, received, strict=True):
            for piece, data in zip(pieces, data_of_pieces, strict=True):
                piece.view_in(slice_[piece.name]).copy_(data)
        return slice_

    @torch.no_grad()
    def collect(
        self, slice_: dict[str, Tensor], units: Sequence[UnitIndices], contribution: Contribution
    ) -> list[Contribution]:
        """Every rank's slice back into the shards; returns the contributions of all ranks. Collective.

        Elements that no rank had stay as they are. Those that several had become their mean, weighted by the steps that
        each trained for. The slice is emptied, to save memory.
        """
        rank, ranks = self.comm.rank, range(self.comm.size)
        mine = torch.tensor(contribution, dtype=torch.float64, device=self.device)
        outgoing = [[CONTRIBUTION, *self.layout.pieces(units[rank], to)] for to in ranks]
        expected = [[CONTRIBUTION, *self.layout.pieces(units[source], rank)] for source in ranks]
        tensors = (mine if p is CONTRIBUTION else p.view_in(slice_[p.name]) for pieces in outgoing for p in pieces)
        buffer = [pack_pieces(outgoing, tensors, self.device)]
        slice_.clear()
        received = exchange_pieces(buffer.pop(), outgoing, expected, self.comm)  # popped, so that nothing keeps it
        contributions = [Contribution(*some[0].tolist()) for some in received]
        copies: dict[str, list[tuple[float, Tensor]]] = {}  # of tensors that all ranks have
        for source in ranks:
            for piece, data in zip(expected[source][1:], received[source][1:], strict=True):
                if self.slices.is_divided(piece.name):
                    put_slice(self.shards[piece.name], piece.slice_index, data)
                else:
                    copies.setdefault(piece.name, []).append((contributions[source].steps, data))
        for name, of_ranks in copies.items():
            self.shards[name].copy_(_weighted_mean(of_ranks))
        return contributions

    # ---- whole tensors

    def scatter(self, tensors: Mapping[str, Tensor]) -> None:
        """Rank 0's whole tensors into the shards of all ranks. Collective."""
        rank, ranks = self.comm.rank, range(self.comm.size)
        for names in self._names_per_message(self.shards):
            outgoing = [[self.layout.whole_shard(n, to) for n in names] if rank == 0 else [] for to in ranks]
            expected = [[self.layout.whole_shard(n, rank) for n in names] if source == 0 else [] for source in ranks]
            shards = [self.layout.shard_of(tensors[n], n, to) for to in ranks for n in names if rank == 0]
            buffer = pack_pieces(outgoing, shards, self.device)
            for name, data in zip(names, exchange_pieces(buffer, outgoing, expected, self.comm)[0], strict=True):
                self.shards[name].copy_(data)

    def gather(self, names: Iterable[str] | None = None, root: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, a few at a time, on every rank or only on one; the others get none. Collective."""
        ranks = range(self.comm.size)
        is_receiver = root in (None, self.comm.rank)
        for some in self._names_per_message(self.shards if names is None else names):
            mine = [self.layout.whole_shard(n, self.comm.rank) for n in some]
            outgoing = [mine if root in (None, to) else [] for to in ranks]
            expected = [[self.layout.whole_shard(n, source) for n in some] if is_receiver else [] for source in ranks]
            tensors = (self.shards[p.name] for pieces in outgoing for p in pieces)
            received = exchange_pieces(pack_pieces(outgoing, tensors, self.device), outgoing, expected, self.comm)
            for i, name in enumerate(some if is_receiver else ()):
                shards = [received[source][i] for source in ranks]
                dim = self.layout.dims.get(name)
                yield name, shards[0].clone() if dim is None else torch.cat(shards, dim)

    def _names_per_message(self, names: Iterable[str]) -> list[list[str]]:
        """Names in messages no larger than a rank's shards, so that no rank need hold much more."""
        sizes = {name: num_bytes(self.slices.tensors[name]) for name in names}
        return groups_within(sizes, self.num_bytes // self.comm.size)


def _weighted_mean(copies: list[tuple[float, Tensor]]) -> Tensor:
    """x₀ + Σ wᵢ·(xᵢ − x₀): the mean weighted by steps, and exactly x where all are x, be it infinite.

    Of whole numbers, those of the rank that took most steps.
    """
    total = sum(steps for steps, _ in copies)
    first = copies[0][1]
    if not (first.is_floating_point() or first.is_complex()):
        return max(copies, key=lambda copy: copy[0])[1]
    if len(copies) == 1:
        return first
    wide = first.to(torch.promote_types(first.dtype, torch.float32))
    mean = wide.clone()
    for steps, other in copies[1:]:
        difference = (other.to(wide.dtype) - wide).masked_fill(other == first, 0)
        mean += (steps / total if total else 1 / len(copies)) * difference
    return mean.to(first.dtype)
