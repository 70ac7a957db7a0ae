"""Homes: a network of which every rank keeps a part, and from which narrow networks are dealt and collected.

Each tensor lies spread over the ranks along its longest dimension. A rank's slice of the network comes from all homes
in one all-to-all, and goes back in another; nobody holds the whole. Which elements those are follows from the deal,
so no index travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.common.tensors import num_bytes
from thinwire.surgery.slices import SliceIndex, Slices, UnitIndices, put_slice, slice_shape, take_slice


class Report(NamedTuple):
    """What a rank tells the others when it sends its slice home."""

    steps: float  # that it trained for
    seconds: float  # that this took


class Piece(NamedTuple):
    """What a rank's slice and a home have in common of one tensor."""

    name: str
    places: SliceIndex  # in the home's part
    shape: list[int]
    dim: int  # along this dimension of the slice, from `start` on
    start: int


TOLD = Piece("", (), [len(Report._fields)], 0, 0)


class ShardedTensors:
    """One rank's view of tensors that are spread over all ranks; `parts` is what lies here."""

    def __init__(
        self, slices: Slices, comm: Comm, device: torch.device, dtypes: Mapping[str, torch.dtype], fill: float = 0.0
    ) -> None:
        self.slices, self.comm, self.device = slices, comm, device
        self.dtypes, self.fill_value = dict(dtypes), fill
        self.shapes = {name: tuple(slices.tensors[name].shape) for name in dtypes}
        self.dims = {name: shape.index(max(shape)) for name, shape in self.shapes.items() if shape}  # spread along
        self.parts = {
            name: torch.full(self._shape(name, comm.rank), fill, dtype=dtype, device=device)
            for name, dtype in self.dtypes.items()
        }

    def copy(self) -> ShardedTensors:
        """The same homes again, to collect into without changing these."""
        other = ShardedTensors.__new__(ShardedTensors)
        other.__dict__ |= self.__dict__ | {"parts": {name: part.clone() for name, part in self.parts.items()}}
        return other

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        """Go on with what lay here before."""
        for name, part in self.parts.items():
            part.copy_(parts[name])

    # ---- slices

    @torch.no_grad()
    def deal(self, hands: Sequence[UnitIndices]) -> dict[str, Tensor]:
        """This rank's slice, from all homes. Collective."""
        rank, ranks = self.comm.rank, range(self.comm.size)
        outgoing = [self._pieces(hands[to], rank) for to in ranks]
        pieces = [self._pieces(hands[rank], home) for home in ranks]
        arrived = self._swap(
            self._packed(outgoing, lambda p: take_slice(self.parts[p.name], p.places)), outgoing, pieces
        )
        slice_: dict[str, Tensor] = {}
        for name, dtype in self.dtypes.items():
            places = self.slices.slice_index(name, hands[rank])
            if places is not None:
                shape = slice_shape(self.shapes[name], places)
                slice_[name] = torch.empty(shape, dtype=dtype, device=self.device)
        for home in ranks:
            for piece, data in zip(pieces[home], arrived[home], strict=True):
                target = slice_[piece.name]
                (target.narrow(piece.dim, piece.start, piece.shape[piece.dim]) if piece.shape else target).copy_(data)
        return slice_

    @torch.no_grad()
    def collect(self, slice_: dict[str, Tensor], hands: Sequence[UnitIndices], report: Report) -> list[Report]:
        """Every rank's slice back to where it lives; returns what they report. Collective.

        What nobody had stays as it is. What several had becomes their mean, weighted by the steps that they trained
        for. The slice is used up.
        """
        rank, ranks = self.comm.rank, range(self.comm.size)
        told = torch.tensor(report, dtype=torch.float64, device=self.device)
        outgoing = [[TOLD, *self._pieces(hands[rank], home)] for home in ranks]
        pieces = [[TOLD, *self._pieces(hands[source], rank)] for source in ranks]
        box = [self._packed(outgoing, lambda p: told if p is TOLD else _taken(slice_[p.name], p))]
        slice_.clear()
        arrived = self._swap(box.pop(), outgoing, pieces)
        reports = [Report(*some[0].tolist()) for some in arrived]
        shared: dict[str, list[tuple[float, Tensor]]] = {}
        for source in ranks:
            for piece, data in zip(pieces[source][1:], arrived[source][1:], strict=True):
                if self.slices.is_divided(piece.name):
                    put_slice(self.parts[piece.name], piece.places, data)
                else:
                    shared.setdefault(piece.name, []).append((reports[source].steps, data))
        for name, copies in shared.items():
            self.parts[name].copy_(_mean(copies))
        return reports

    # ---- whole tensors

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Rank 0's whole tensors, each part to its home. Collective."""
        rank, ranks = self.comm.rank, range(self.comm.size)
        for names in self._in_turn():
            outgoing = [[self._all_of(n, home) for n in names] if rank == 0 else [] for home in ranks]
            box = self._packed(outgoing, lambda p: self._part(tensors[p.name], p.name, p.start))
            expected = [[self._all_of(n, rank) for n in names] if home == 0 else [] for home in ranks]
            for name, data in zip(names, self._swap(box, outgoing, expected)[0], strict=True):
                self.parts[name].copy_(data)

    def whole(self, names: Iterable[str] | None = None, root: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, a few at a time, on every rank or only on one; the others get none. Collective."""
        ranks = range(self.comm.size)
        here = root in (None, self.comm.rank)
        for some in self._in_turn(names):
            mine = [self._all_of(n, self.comm.rank) for n in some]
            outgoing = [mine if root in (None, to) else [] for to in ranks]
            expected = [[self._all_of(n, home) for n in some] if here else [] for home in ranks]
            arrived = self._swap(self._packed(outgoing, lambda p: self.parts[p.name]), outgoing, expected)
            for i, name in enumerate(some if here else ()):
                parts = [arrived[home][i] for home in ranks]
                yield name, parts[0].clone() if name not in self.dims else torch.cat(parts, self.dims[name])

    def _in_turn(self, names: Iterable[str] | None = None) -> Iterator[list[str]]:
        """Names, as many at a time as make up a message of the size of a home, so that nobody need hold much more."""
        sizes = {n: num_bytes(self.slices.tensors[n]) for n in (self.parts if names is None else names)}
        most = self.num_bytes // self.comm.size
        some: list[str] = []
        for name in sizes:
            if some and sum(sizes[n] for n in some) + sizes[name] > most:
                yield some
                some = []
            some.append(name)
        if some:
            yield some

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return sum(torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    # ---- where things lie

    def _bounds(self, name: str, home: int) -> tuple[int, int]:
        """Which part of a tensor's longest dimension a rank keeps; rank 0 keeps what has no dimension."""
        if name not in self.dims:
            return 0, int(home == 0)
        length = self.shapes[name][self.dims[name]]
        return length * home // self.comm.size, length * (home + 1) // self.comm.size

    def _shape(self, name: str, home: int) -> list[int]:
        begin, end = self._bounds(name, home)
        if name not in self.dims:
            return [] if end else [0]
        return [end - begin if d == self.dims[name] else length for d, length in enumerate(self.shapes[name])]

    def part_of(self, name: str, tensor: Tensor) -> Tensor:
        """What of a whole tensor lives here."""
        return self._part(tensor, name, self.comm.rank)

    def _part(self, tensor: Tensor, name: str, home: int) -> Tensor:
        begin, end = self._bounds(name, home)
        if name not in self.dims:
            return tensor if end else tensor.new_zeros(0)
        return tensor.narrow(self.dims[name], begin, end - begin)

    def _all_of(self, name: str, home: int) -> Piece:
        return Piece(name, (), self._shape(name, home), 0, home)

    def _pieces(self, hand: UnitIndices, home: int) -> list[Piece]:
        """What a rank with these units has of what lies in a home."""
        found = []
        for name in self.dtypes:
            places = self.slices.slice_index(name, hand)
            begin, end = self._bounds(name, home)
            if places is None or begin == end:
                continue
            if name not in self.dims:
                found.append(Piece(name, places, [], 0, 0))
                continue
            dim = self.dims[name]
            chosen = places[dim]
            here = list(places)
            start = begin
            if chosen is not None:
                start, stop = torch.searchsorted(chosen, torch.tensor([begin, end])).tolist()
                here[dim] = chosen[start:stop] - begin
            found.append(Piece(name, tuple(here), slice_shape(self._shape(name, home), tuple(here)), dim, start))
        return found

    # ---- the wire

    def _packed(self, outgoing: Sequence[Sequence[Piece]], give: Callable[[Piece], Tensor]) -> Tensor:
        """What `give` gives for each piece, end to end."""
        box = torch.empty(sum(map(self._size, outgoing)), dtype=torch.uint8, device=self.device)
        at = 0
        for piece in (piece for some in outgoing for piece in some):
            tensor = give(piece)
            assert tensor.dtype == self._dtype(piece), (piece.name, tensor.dtype)
            data = tensor.contiguous().view(-1).view(torch.uint8)
            box[at : at + len(data)] = data
            at += len(data)
        return box

    def _swap(
        self, box: Tensor, outgoing: Sequence[Sequence[Piece]], expected: Sequence[Sequence[Piece]]
    ) -> list[list[Tensor]]:
        """Send everybody their pieces, which lie end to end, and receive those that they have for us."""
        room = torch.empty(1, dtype=torch.uint8, device=self.device)
        wanted = [room.expand(self._size(some)) for some in expected]
        arrived = self.comm.all_to_all(box.split([self._size(some) for some in outgoing]), wanted)
        return [
            [
                _typed(data, self._dtype(piece), piece.shape)
                for data, piece in zip(part.split([self._size([p]) for p in some]), some, strict=True)
            ]
            for part, some in zip(arrived, expected, strict=True)
        ]

    def _dtype(self, piece: Piece) -> torch.dtype:
        return torch.float64 if piece is TOLD else self.dtypes[piece.name]

    def _size(self, pieces: Sequence[Piece]) -> int:
        """In bytes."""
        return sum(torch.Size(piece.shape).numel() * self._dtype(piece).itemsize for piece in pieces)


def _taken(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.narrow(piece.dim, piece.start, piece.shape[piece.dim]) if piece.shape else tensor


def _typed(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(shape)


def _mean(copies: list[tuple[float, Tensor]]) -> Tensor:
    """x₀ + Σ wᵢ·(xᵢ − x₀): the weighted mean, and exactly x where all are x, be it infinite.

    Of whole numbers, those of the rank that took most steps.
    """
    total = sum(n for n, _ in copies)
    first = copies[0][1]
    if not (first.is_floating_point() or first.is_complex()):
        return max(copies, key=lambda copy: copy[0])[1]
    if len(copies) == 1:
        return first
    wide = first.to(torch.promote_types(first.dtype, torch.float32))
    mean = wide.clone()
    for n, other in copies[1:]:
        apart = (other.to(wide.dtype) - wide).masked_fill(other == first, 0)
        mean += (n / total if total else 1 / len(copies)) * apart
    return mean.to(first.dtype)
