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
from thinwire.exchange.pieces import Part, Piece, Run, exchange_pieces, pack_pieces
from thinwire.exchange.shard_layout import ShardLayout
from thinwire.exchange.slice_routes import SMALL, Routes, make_routes, small_tensors
from thinwire.surgery.slices import SliceIndex, Slices, UnitIndices, put_slice, slice_shape, take_slice


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
        shapes = {name: self.layout.shard_shape(name, comm.rank) for name in dtypes}
        self.small = small_tensors(dtypes, {n: s for n, s in shapes.items() if slices.tensors[n].numel() <= SMALL})
        self.vectors = {
            dtype: torch.full((small.size,), fill_value, dtype=dtype, device=device)
            for dtype, small in self.small.items()
        }
        large = {
            name: torch.full(shape, fill_value, dtype=dtypes[name], device=device)
            for name, shape in shapes.items()
            if slices.tensors[name].numel() > SMALL
        }
        self._set_shards(large)
        self._known_routes: tuple[Sequence[UnitIndices], Routes] | None = None

    def _set_shards(self, large: Mapping[str, Tensor]) -> None:
        """All shards by name: large ones, and views of the vectors that small ones lie in."""
        views = {n: t for dtype, small in self.small.items() for n, t in small.views(self.vectors[dtype]).items()}
        self.shards = {name: large[name] if name in large else views[name] for name in self.layout.dtypes}

    @property
    def num_bytes(self) -> int:
        """Of the whole tensors."""
        return self.layout.num_bytes

    def copy(self) -> ShardedTensors:
        """A copy, to collect into without changing these."""
        other = ShardedTensors.__new__(ShardedTensors)
        other.__dict__ |= self.__dict__ | {"vectors": {dtype: vector.clone() for dtype, vector in self.vectors.items()}}
        is_small = {name for small in self.small.values() for name in small.offsets}
        other._set_shards({name: shard.clone() for name, shard in self.shards.items() if name not in is_small})
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
        routes = self._routes(units)
        tensors = (take_slice(self._tensor_of(p), p.slice_index) for parts in routes.to_slices for p in parts)
        buffer = pack_pieces(routes.to_slices, tensors, self.device)
        received = exchange_pieces(buffer, routes.to_slices, routes.from_shards, self.comm)
        vectors, slice_ = self._new_slice(units[self.comm.rank], routes)
        for parts, data_of_parts in zip(routes.from_shards, received, strict=True):
            for part, data in zip(parts, data_of_parts, strict=True):
                if isinstance(part, Run):
                    put_slice(vectors[part.dtype], part.slice_index, data)
                else:
                    part.view_in(slice_[part.name]).copy_(data)
        return slice_

    @torch.no_grad()
    def collect(
        self, slice_: dict[str, Tensor], units: Sequence[UnitIndices], contribution: Contribution
    ) -> list[Contribution]:
        """Every rank's slice back into the shards; returns the contributions of all ranks. Collective.

        Elements that no rank had stay as they are. Tensors that all ranks had, and slices of ranks with the same units,
        become their mean, weighted by the steps that each trained for. The slice is emptied, to save memory.
        """
        routes = self._routes(units)
        outgoing = [[CONTRIBUTION, *parts] for parts in routes.from_shards]
        expected = [[CONTRIBUTION, *parts] for parts in routes.to_slices]
        buffer = [self._packed_slice(slice_, outgoing, contribution, routes)]
        slice_.clear()
        received = exchange_pieces(buffer.pop(), outgoing, expected, self.comm)  # popped, so that nothing keeps it
        contributions = [Contribution(*row) for row in torch.stack([some[0] for some in received]).tolist()]
        copies: dict[tuple[str, int], list[tuple[float, Tensor]]] = {}  # by the first name, and whose units they have
        targets: dict[tuple[str, int], tuple[Tensor, SliceIndex]] = {}
        for own_units, done, parts, data_of_parts in zip(units, contributions, expected, received, strict=True):
            for part, data in zip(parts[1:], data_of_parts[1:], strict=True):
                name = part.names[0] if isinstance(part, Run) else part.name
                key = name, id(own_units) if self.slices.is_divided(name) else 0
                copies.setdefault(key, []).append((done.steps, data))
                targets[key] = self._tensor_of(part), part.slice_index
        for key, of_ranks in copies.items():
            put_slice(*targets[key], _weighted_mean(of_ranks))
        return contributions

    def _packed_slice(
        self, slice_: Mapping[str, Tensor], outgoing: list[list[Part]], contribution: Contribution, routes: Routes
    ) -> Tensor:
        """This rank's slice, and what it has done to it, as the bytes that each rank is to get."""
        mine = torch.tensor(contribution, dtype=torch.float64).to(self.device)
        vectors = {}
        for dtype, small in routes.small.items():
            vectors[dtype] = torch.empty(small.size, dtype=dtype, device=self.device)
            torch._foreach_copy_(list(small.views(vectors[dtype]).values()), [slice_[name] for name in small.offsets])

        def tensor_of(part: Part) -> Tensor:
            if isinstance(part, Run):
                return take_slice(vectors[part.dtype], part.slice_index)
            return mine if part is CONTRIBUTION else part.view_in(slice_[part.name])

        return pack_pieces(outgoing, (tensor_of(part) for parts in outgoing for part in parts), self.device)

    def _new_slice(self, units: UnitIndices, routes: Routes) -> tuple[dict[torch.dtype, Tensor], dict[str, Tensor]]:
        """Memory for a slice: the vectors of its small tensors, and all its tensors."""
        vectors = {d: torch.empty(small.size, dtype=d, device=self.device) for d, small in routes.small.items()}
        slice_ = {n: t for dtype, small in routes.small.items() for n, t in small.views(vectors[dtype]).items()}
        for name, dtype in self.layout.dtypes.items():
            index = self.slices.slice_index(name, units)
            if index is not None and name not in slice_:
                shape = slice_shape(self.layout.shapes[name], index)
                slice_[name] = torch.empty(shape, dtype=dtype, device=self.device)
        return vectors, slice_

    def _routes(self, units: Sequence[UnitIndices]) -> Routes:
        """The routes of these units; a round needs the same ones for dealing and for collecting."""
        if self._known_routes is None or self._known_routes[0] is not units:
            self._known_routes = units, make_routes(self.layout, units, self.comm.rank, self.small, self.device)
        return self._known_routes[1]

    def _tensor_of(self, part: Part) -> Tensor:
        """What a part of this rank's shards is indexed in."""
        return self.vectors[part.dtype] if isinstance(part, Run) else self.shards[part.name]

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
