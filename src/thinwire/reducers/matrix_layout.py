"""How the matrices of a bucket and their thin factors lie in vectors, so that few operations work on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.reducers.base import Named

Rows = tuple[int, int]  # so many factors with rows of such a length


class Place(NamedTuple):
    """Where a tensor lies in a vector."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int

    def view(self, vector: Tensor) -> Tensor:
        """The tensor."""
        return vector.as_strided(self.shape, self.stride, vector.storage_offset() + self.begin)


class Layout:
    """Matrices of one shape lie one after the other: a stack, for one batched product. Behind all stacks lie the
    tensors that are sent as they are.

    A second vector holds two thin factors of each matrix, transposed (products with a few long rows are the fastest):
    a left one (rank × rows) and a right one (rank × columns). First come all left ones by length, then all right ones
    by length, so that those of one length, and those of one stack, are neighbours.
    """

    def __init__(self, tensors: tuple[tuple[str, tuple[int, ...]], ...], rank: int) -> None:
        self.rank = rank
        shapes = {name: _matrix_shape(shape) for name, shape in tensors if saves_bytes(shape, rank)}
        stacks: dict[tuple[int, int], list[str]] = {}
        for name, shape in sorted(shapes.items(), key=lambda item: item[1]):
            stacks.setdefault(shape, []).append(name)
        by_columns = sorted(stacks, key=lambda shape: shape[1])
        self._right_order = [by_columns.index(shape) for shape in stacks]
        self._stacks = [(len(names), rows, columns) for (rows, columns), names in stacks.items()]
        self._left = [(len(names), rows) for (rows, _), names in stacks.items()]
        self._right = [(len(stacks[shape]), shape[1]) for shape in by_columns]
        self.left_lengths, self.right_lengths = _joined_lengths(self._left), _joined_lengths(self._right)
        self.num_low = sum(torch.Size(shape).numel() for shape in self._stacks)
        self.num_left, num_right = (rank * sum(c * length for c, length in rows) for rows in (self._left, self._right))
        self.num_factors = self.num_left + num_right
        given = dict(tensors)
        low = [name for names in stacks.values() for name in names]
        self.places = _places({name: given[name] for name in (*low, *given)})
        self.num_elements = sum(torch.Size(shape).numel() for shape in given.values())
        self.num_exact = self.num_elements - self.num_low
        bases = {f"left/{name}": shapes[name][0] for name in low}
        bases |= {f"right/{name}": shape[1] for shape in by_columns for name in stacks[shape]}
        ends = [0, *accumulate(rank * length for length in bases.values())]
        self.basis_places = {
            key: Place((length, rank), (1, length), begin)
            for (key, length), begin in zip(bases.items(), ends, strict=False)
        }

    def named(self, vector: Tensor) -> Named:
        """All tensors, by name."""
        return {name: place.view(vector) for name, place in self.places.items()}

    def matrices(self, vector: Tensor) -> list[Tensor]:
        """The stacks of matrices."""
        parts = vector[: self.num_low].split([torch.Size(shape).numel() for shape in self._stacks])
        return [part.view(shape) for part, shape in zip(parts, self._stacks, strict=True)]

    def exact(self, vector: Tensor) -> Tensor:
        """What is sent as it is."""
        return vector[self.num_low :]

    def factors(self, vector: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The left factors of each stack of matrices, and the right ones; or pairs of them, from `paired`."""
        width = self.rank * vector.numel() // self.num_factors if self.num_factors else 0
        left, right = vector.tensor_split([self.num_left * width // self.rank])
        by_columns = split_rows(right, self._right, width)
        return split_rows(left, self._left, width), [by_columns[i] for i in self._right_order]

    def paired(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        """Each factor of one vector, and below it that of another; the vectors may be given in parts."""
        both = torch.cat([*first, *second])
        return both.index_select(0, _pairs(tuple(self._left + self._right), self.rank, both.device))


def layout_of(tensors: Named, rank: int) -> Layout:
    """The layout for these tensors."""
    return _layout(tuple((name, tuple(t.shape)) for name, t in tensors.items()), rank)


_layout = lru_cache(maxsize=256)(Layout)  # buckets never change


def saves_bytes(shape: tuple[int, ...], rank: int) -> bool:
    """Whether two factors of this rank are smaller than a tensor of this shape.

    >>> [saves_bytes(shape, rank=4) for shape in ((64, 3, 3, 3), (8, 8), (64,))]
    [True, False, False]
    """
    rows, columns = _matrix_shape(shape)
    return len(shape) > 1 and rank * (rows + columns) < rows * columns


def split_rows(vector: Tensor, lengths: Sequence[Rows], height: int) -> list[Tensor]:
    """Stacks of matrices with few rows: `count` matrices of (height × length) for each (count, length).

    >>> [tuple(stack.shape) for stack in split_rows(torch.zeros(40), [(2, 3), (1, 4)], height=4)]
    [(2, 4, 3), (1, 4, 4)]
    """
    parts = vector.split([count * height * length for count, length in lengths])
    return [part.view(count, height, length) for part, (count, length) in zip(parts, lengths, strict=True)]


def join(tensors: Sequence[Tensor], places: Iterable[Place]) -> Tensor:
    """A vector with the tensors in their places: the one that they are views of already, or a new one.

    >>> vector, places = torch.zeros(4), [Place((2,), (1,), 0), Place((2,), (1,), 2)]
    >>> join([place.view(vector) for place in places], places).data_ptr() == vector.data_ptr()
    True
    """
    count = sum(t.numel() for t in tensors)
    full = [(t, place) for t, place in zip(tensors, places, strict=True) if t.numel()]
    first = full[0][0] if full else torch.empty(0)
    begin, offset = first.data_ptr(), first.storage_offset()
    fits = first.untyped_storage().nbytes() >= 4 * (offset + count)
    if fits and all(t.data_ptr() == begin + 4 * p.begin and t.stride() == p.stride for t, p in full):
        return first.as_strided((count,), (1,), offset)
    joined = first.new_empty(count)
    torch._foreach_copy_([place.view(joined) for _, place in full], [t for t, _ in full])
    return joined


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(First dimension, the others)."""
    rows = shape[0] if shape else 0
    return rows, torch.Size(shape).numel() // rows if rows else 0


def _joined_lengths(rows: list[Rows]) -> list[Rows]:
    """Neighbours of the same length as one."""
    return [(sum(count for count, _ in some), length) for length, some in groupby(rows, key=lambda row: row[1])]


@lru_cache(maxsize=256)
def _pairs(rows: tuple[Rows, ...], rank: int, device: torch.device) -> Tensor:
    """Where each element of `paired` is in the two vectors, one behind the other."""
    sizes = [rank * length for count, length in rows for _ in range(count)]
    begins, total = [0, *accumulate(sizes)], sum(sizes)
    both = [(begin + other, size) for begin, size in zip(begins, sizes, strict=False) for other in (0, total)]
    order = [torch.arange(begin, begin + size) for begin, size in both]
    return torch.cat([torch.empty(0, dtype=torch.int64), *order]).to(device)


def _places(tensors: dict[str, tuple[int, ...]]) -> dict[str, Place]:
    """Places one after the other, in the usual order of memory, whatever order the tensors have on this rank."""
    found, begin = {}, 0
    for name, shape in tensors.items():
        found[name] = Place(shape, torch.empty(shape, device="meta").stride(), begin)
        begin += torch.Size(shape).numel()
    return found
