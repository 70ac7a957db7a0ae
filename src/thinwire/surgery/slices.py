"""Slices: the parts of a network's tensors that belong to some of its units, taken out and put back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from thinwire.common.tensors import named_tensors
from thinwire.errors import UsageError
from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.axes.residual import ResidualBlocks
from thinwire.surgery.huggingface import is_transposed_linear

UnitIndices = list[Tensor]  # the units of each axis that one rank has, in order
SliceIndex = tuple[Tensor | None, ...]  # for each dimension of a tensor the indices in it; None is all of it


class Slices:
    """A model's tensors, and which part of each belongs to which units.

    Tensors without units of their own (the bias of the last layer, a residual stream) belong to every rank.
    """

    def __init__(self, model: nn.Module, axes: Sequence[Axis] | ResidualBlocks) -> None:
        self.tensors = {name: t.detach().to("meta") for name, t in named_tensors(model).items()}
        self.axes: list[Axis | ResidualBlocks] = [axes] if isinstance(axes, ResidualBlocks) else list(axes)
        self.unit_dims: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in self.tensors}  # axis, repeats
        self.block_of: dict[str, int] = {}  # the residual block that a tensor belongs to
        self._elements = WeakIdKeyDictionary()  # of some units, along dimensions that have them
        for number, axis in enumerate(self.axes):
            if isinstance(axis, ResidualBlocks):
                for name in self.tensors:
                    owners = [i for i, block in enumerate(axis.branches) if name.startswith(f"{block}.")]
                    self.block_of |= {name: owners[0]} if owners else {}
                continue
            for name, dim, repeats in axis.unit_dims():
                if name in self.unit_dims:  # else it is a non-persistent buffer, which every rank makes for itself
                    self.unit_dims[name][dim] = (number, repeats)

    def slice_index(self, name: str, unit_indices: UnitIndices) -> SliceIndex | None:
        """Where in a tensor the part of a rank with these units is; None if the rank has no part of it."""
        if name in self.block_of and self.block_of[name] not in unit_indices[0]:
            return None
        index: list[Tensor | None] = []
        for dim, length in enumerate(self.tensors[name].shape):
            if dim in self.unit_dims[name]:
                number, repeats = self.unit_dims[name][dim]
                index.append(self._known_elements_of(unit_indices[number], self.axes[number].size, repeats, length))
            else:
                index.append(None)
        return tuple(index)

    def _known_elements_of(self, units: Tensor, *dimension: int) -> Tensor:
        """What `_elements_of` returns. It is computed once for each kind of dimension: many tensors have the same."""
        known: dict[tuple[int, ...], Tensor] = self._elements.setdefault(units, {})
        if dimension not in known:
            known[dimension] = _elements_of(units, *dimension)
        return known[dimension]

    def is_divided(self, name: str) -> bool:
        """Whether a tensor is divided among ranks, so that no element belongs to two of them."""
        return bool(self.unit_dims[name])

    def num_elements(self, unit_indices: UnitIndices) -> int:
        """The number of elements in all parts of a rank with these units."""
        total = 0
        for name, tensor in self.tensors.items():
            index = self.slice_index(name, unit_indices)
            if index is not None:
                total += torch.Size(slice_shape(tensor.shape, index)).numel()
        return total

    def check(self, model: nn.Module, networks: int, scaled: bool) -> None:
        """Raise UsageError if an axis has fewer units than there are narrow networks, or if units cannot be scaled.

        There may be fewer residual blocks than narrow networks: several can have the same one.
        """
        for axis in self.axes:
            if isinstance(axis, Axis) and axis.size < networks:
                raise UsageError(
                    f"{next(iter(axis.made_by))} makes {axis.size} units, too few for {networks} narrow networks to "
                    f"have one each; use at most {axis.size} ranks, subnets={axis.size} or a wider layer"
                )
            for name in unit_users(axis) if scaled else ():
                owner = model.get_submodule(name.rpartition(".")[0])
                is_torchs = type(owner).__module__.startswith("torch.nn.modules.") and not isinstance(
                    owner, nn.Bilinear
                )
                if not is_torchs and not is_transposed_linear(owner):
                    raise UsageError(f"scale=train, but {name} is not of a layer with one input; try scale=eval")


def unit_users(axis: Axis | ResidualBlocks) -> list[str]:
    """The tensors that sum over the units of an axis, or that end the branches of blocks."""
    return axis.branch_ends if isinstance(axis, ResidualBlocks) else list(axis.used_by)


def _elements_of(units: Tensor, size: int, repeats: int, length: int) -> Tensor:
    """The indices of some units along a dimension that has all `size` units, `repeats` times in a row."""
    inner = length // (repeats * size)
    starts = torch.arange(repeats)[:, None] * size + units
    return (starts[:, :, None] * inner + torch.arange(inner)).reshape(-1)


def slice_shape(shape: Sequence[int], index: SliceIndex) -> list[int]:
    """The shape of a slice of a tensor."""
    return [length if i is None else len(i) for length, i in zip(shape, index, strict=True)]


def take_slice(tensor: Tensor, index: SliceIndex) -> Tensor:
    """A copy of a slice of a tensor.

    >>> take_slice(torch.arange(6).view(2, 3), (None, torch.tensor([0, 2]))).tolist()
    [[0, 2], [3, 5]]
    """
    indexed = [dim for dim, i in enumerate(index) if i is not None]
    if not indexed:
        return tensor.clone()
    if len(indexed) == 1:
        return tensor.index_select(indexed[0], _on_device_of(tensor, index[indexed[0]]))
    return tensor[_torch_index(index, indexed, tensor)]


def put_slice(tensor: Tensor, index: SliceIndex, part: Tensor) -> None:
    """Write a slice to where take_slice took it from; all other elements stay as they are."""
    indexed = [dim for dim, i in enumerate(index) if i is not None]
    if not indexed:
        tensor.copy_(part)
    elif len(indexed) == 1:
        tensor.index_copy_(indexed[0], _on_device_of(tensor, index[indexed[0]]), part)
    else:
        tensor[_torch_index(index, indexed, tensor)] = part


def _torch_index(index: SliceIndex, indexed: Sequence[int], tensor: Tensor) -> tuple[Tensor | slice, ...]:
    """The slice as an index for torch. Indexed dimensions must be neighbours, else torch moves them to the front."""
    result: list[Tensor | slice] = [slice(None)] * len(index)
    for dim in range(indexed[0], indexed[-1] + 1):
        result[dim] = _on_device_of(tensor, index[dim], dim).view(-1, *[1] * (indexed[-1] - dim))
    return tuple(result)


def _on_device_of(tensor: Tensor, index: Tensor | None, dim: int = 0) -> Tensor:
    """Indices on the device of a tensor; None is all of a dimension."""
    return torch.arange(tensor.shape[dim], device=tensor.device) if index is None else index.to(tensor.device)
