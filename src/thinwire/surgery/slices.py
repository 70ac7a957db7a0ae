"""Slices: the part of a network that belongs to some of its units, cut out as a narrow network and pasted back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.common.tensors import named_tensors
from thinwire.data import mix
from thinwire.errors import UsageError
from thinwire.surgery.axes import Axis, Blocks
from thinwire.surgery.meta import with_tensors

UnitIndices = list[Tensor]  # the units of each axis that one rank has, in order
Places = tuple[Tensor | None, ...]  # along each dimension of a tensor; None is all of it


class Slices:
    """A model's tensors, and which part of each belongs to which units.

    What has no units of its own (the bias of the last layer, a residual stream) belongs to every rank.
    """

    def __init__(self, model: nn.Module, axes: Sequence[Axis] | Blocks) -> None:
        self.tensors = {name: t.detach().to("meta") for name, t in named_tensors(model).items()}
        self.axes: list[Axis | Blocks] = [axes] if isinstance(axes, Blocks) else list(axes)
        self.along: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in self.tensors}  # dim → axis, repeats
        self.block: dict[str, int] = {}  # the block that a tensor belongs to
        for number, axis in enumerate(self.axes):
            if isinstance(axis, Blocks):
                for name in self.tensors:
                    owners = [i for i, block in enumerate(axis.branches) if name.startswith(f"{block}.")]
                    self.block |= {name: owners[0]} if owners else {}
                continue
            for name, along in (*axis.made_by.items(), *axis.used_by.items()):
                dim, repeats = (along, 1) if isinstance(along, int) else along
                if name in self.along:  # else it is a cache, which every rank makes for itself
                    self.along[name][dim] = (number, repeats)

    def places(self, name: str, hand: UnitIndices) -> Places | None:
        """Where in a tensor a rank's part lies; None if it has none of it."""
        if name in self.block and self.block[name] not in hand[0]:
            return None
        shape, along = self.tensors[name].shape, self.along[name]
        return tuple(
            _places(hand[along[dim][0]], self.axes[along[dim][0]].size, along[dim][1], length) if dim in along else None
            for dim, length in enumerate(shape)
        )

    def is_cut(self, name: str) -> bool:
        """Whether no element of a tensor belongs to two ranks."""
        return bool(self.along[name])

    def count(self, hand: UnitIndices) -> int:
        """How many elements a rank's part has, of all tensors together."""
        total = 0
        for name, tensor in self.tensors.items():
            places = self.places(name, hand)
            if places is not None:
                total += int(torch.tensor(part_shape(tensor.shape, places)).prod())
        return total

    def check(self, model: nn.Module, ranks: int, scaled: bool) -> None:
        """Raise UsageError where some rank would have no unit of an axis, or units cannot be scaled; blocks may be
        had by several."""
        for axis in self.axes:
            if isinstance(axis, Axis) and axis.size < ranks:
                raise UsageError(
                    f"{next(iter(axis.made_by))} makes {axis.size} units, too few for {ranks} ranks to have one each; "
                    f"use at most {axis.size} ranks or a wider layer"
                )
            ends = axis.used_by if isinstance(axis, Axis) else [end for some in axis.branches.values() for end in some]
            for name in ends if scaled else ():
                owner = model.get_submodule(name.rpartition(".")[0])
                if not type(owner).__module__.startswith("torch.nn.modules.") or isinstance(owner, nn.Bilinear):
                    raise UsageError(f"scale=train, but {name} is not of a layer with one input; try scale=eval")


def _places(units: Tensor, size: int, repeats: int, length: int) -> Tensor:
    """Where a dimension that is made up of all units, `repeats` times, has those of some of them."""
    inner = length // (repeats * size)
    starts = torch.arange(repeats)[:, None] * size + units
    return (starts[:, :, None] * inner + torch.arange(inner)).reshape(-1)


def part_shape(shape: Sequence[int], places: Places) -> list[int]:
    """The shape of a part."""
    return [length if p is None else len(p) for length, p in zip(shape, places, strict=True)]


def cut(tensor: Tensor, places: Places) -> Tensor:
    """A copy of a part of a tensor.

    >>> cut(torch.arange(6).view(2, 3), (None, torch.tensor([0, 2]))).tolist()
    [[0, 2], [3, 5]]
    """
    return tensor[_index(places, tensor)].clone()


def paste(tensor: Tensor, places: Places, part: Tensor) -> None:
    """Put a part back where it was cut out; all else stays as it is."""
    tensor[_index(places, tensor)] = part


def _index(places: Places, tensor: Tensor) -> tuple[Tensor | slice, ...]:
    """The part as an index. Chosen dimensions must be neighbours, else torch would move them to the front."""
    chosen = [dim for dim, p in enumerate(places) if p is not None]
    index: list[Tensor | slice] = [slice(None)] * len(places)
    for dim in range(chosen[0], chosen[-1] + 1) if chosen else ():
        p = places[dim]
        p = torch.arange(tensor.shape[dim]) if p is None else p
        index[dim] = p.to(tensor.device).view(-1, *[1] * (chosen[-1] - dim))
    return tuple(index)


# ---- dealing


def deal(sizes: Sequence[int], shares: Sequence[float], *numbers: int) -> list[UnitIndices]:
    """Every unit of each axis to one rank, at random: a function of the numbers (seed and round), so none need travel.

    Ranks get numbers of units in proportion to their shares, at least one each. Where there are fewer units than ranks,
    some are dealt twice.

    >>> [hand[0].tolist() for hand in deal([5], [1, 1], 0, 0)]
    [[1, 2, 4], [0, 3]]
    """
    hands: list[UnitIndices] = [[] for _ in shares]
    for axis, size in enumerate(sizes):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(mix(*numbers, axis)))
        if size < len(shares):
            order = order.repeat(-(-len(shares) // size))[: len(shares)]
        for hand, units in zip(hands, order.split(portions(len(order), shares)), strict=True):
            hand.append(units.sort().values)
    return hands


def portions(size: int, shares: Sequence[float]) -> list[int]:
    """A number in whole parts, in proportion to shares, none of them 0; what is left over goes to the most deserving.

    >>> portions(10, [1, 1, 1]), portions(10, [8, 1, 1]), portions(4, [100, 1, 1])
    ([4, 3, 3], [8, 1, 1], [2, 1, 1])
    """
    spare, total = size - len(shares), sum(shares)
    wanted = [max(0.0, size * share / total - 1) for share in shares]
    scale = spare / sum(wanted) if sum(wanted) else 0.0
    exact = [w * scale for w in wanted]
    parts = [int(x) for x in exact]
    for i in sorted(range(len(shares)), key=lambda i: parts[i] - exact[i])[: spare - sum(parts)]:
        parts[i] += 1
    return [1 + part for part in parts]


# ---- narrow networks


def narrow(
    model: nn.Module, slices: Slices, hand: UnitIndices, tensors: Mapping[str, Tensor], scaled: bool
) -> nn.Module:
    """The narrow network of one rank's units, of the same depth, from its parts of the tensors.

    Blocks that others have are left out. With `scaled`, what takes units in gets them times (all / those here), so that
    sums are as large as in the whole network, unless a norm follows.
    """
    made = with_tensors(model, tensors)
    for axis, units in zip(slices.axes, hand, strict=True):
        times = axis.size / len(units) if scaled and not axis.normed else 1.0
        if isinstance(axis, Blocks):
            for i, (block, ends) in enumerate(axis.branches.items()):
                if i not in units:
                    made.set_submodule(block, _Skipped())
                elif times != 1:
                    for end in dict.fromkeys(name.rpartition(".")[0] for name in ends):
                        made.get_submodule(end).register_forward_hook(_TimesOutput(times))
            continue
        for path, per_unit in axis.counts.items():
            owner, _, name = path.rpartition(".")
            module = made.get_submodule(owner)
            number = per_unit * len(units)
            setattr(module, name, (number,) if isinstance(getattr(module, name), tuple) else number)
        for name in axis.used_by if times != 1 else ():
            made.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(_TimesInput(times))
    return made


class _Skipped(nn.Identity):
    """A residual block that is left out; what else it would be given does not matter."""

    def forward(self, input: Tensor, *others: Any, **options: Any) -> Tensor:
        return input


class _TimesInput:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self.factor, *inputs[1:])


class _TimesOutput:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * self.factor


def eval_scales(slices: Slices, hands: Sequence[UnitIndices], all_axes: bool = False) -> dict[str, float]:
    """What to multiply tensors of the whole network by, so that its sums are as large as those of narrow ones.

    Where a norm follows, nothing, unless `all_axes` are asked for.
    """
    factors: dict[str, float] = {}
    for number, axis in enumerate(slices.axes):
        if axis.normed and not all_axes:
            continue
        share = sum(len(hand[number]) for hand in hands) / (len(hands) * axis.size)
        ends = (
            [end for branch in axis.branches.values() for end in branch] if isinstance(axis, Blocks) else axis.used_by
        )
        factors |= {name: share * factors.get(name, 1.0) for name in ends}
    return factors
