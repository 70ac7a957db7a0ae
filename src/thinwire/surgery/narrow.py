"""Narrow networks: a network of the same depth with only the units, or residual blocks, of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.axes.residual import ResidualBlocks, find_residual_blocks
from thinwire.surgery.meta import with_tensors
from thinwire.surgery.slices import Slices, UnitIndices, unit_users


def narrow_network(
    model: nn.Module, slices: Slices, unit_indices: UnitIndices, tensors: Mapping[str, Tensor], scaled: bool
) -> nn.Module:
    """The narrow network of one rank's units, of the same depth, from the rank's slices of the tensors.

    Residual blocks of other ranks are left out. With `scaled`, units are multiplied by (number of all units / number of
    units here), so that sums over them are as large as in the whole network, unless a norm follows.
    """
    network = with_tensors(model, tensors)
    for axis, units in zip(slices.axes, unit_indices, strict=True):
        scale = axis.size / len(units) if scaled and not axis.normed else 1.0
        if isinstance(axis, ResidualBlocks):
            _keep_blocks(network, axis, units, scale)
        else:
            _keep_units(network, axis, len(units), scale)
    return network


def _keep_blocks(network: nn.Module, blocks: ResidualBlocks, kept: Tensor, scale: float) -> None:
    for i, (block, branch_ends) in enumerate(blocks.branches.items()):
        if i not in kept:
            network.set_submodule(block, _SkippedBlock())
        elif scale != 1:
            for layer in dict.fromkeys(name.rpartition(".")[0] for name in branch_ends):
                network.get_submodule(layer).register_forward_hook(_ScaleOutput(scale))


def _keep_units(network: nn.Module, axis: Axis, num_units: int, scale: float) -> None:
    for path, per_unit in axis.counts.items():
        owner, _, name = path.rpartition(".")
        module = network.get_submodule(owner)
        number = per_unit * num_units
        setattr(module, name, (number,) if isinstance(getattr(module, name), tuple) else number)
    for name in axis.used_by if scale != 1 else ():
        network.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(_ScaleInput(scale))


class _SkippedBlock(nn.Identity):
    """Stands for a residual block that is left out: returns its first input and ignores all others."""

    def forward(self, input: Tensor, *others: Any, **options: Any) -> Tensor:
        return input


class _ScaleInput:
    """A forward pre-hook; a class, so that networks with it can be pickled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self.scale, *inputs[1:])


class _ScaleOutput:
    """A forward hook; a class, so that networks with it can be pickled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * self.scale


def eval_scales(slices: Slices, unit_indices: Sequence[UnitIndices], all_axes: bool = False) -> dict[str, float]:
    """Factors for tensors of the whole network that make its sums as large as those of narrow networks.

    `unit_indices` has the units of every rank. Axes that a norm follows need no factor, and get one only with
    `all_axes`.
    """
    scales: dict[str, float] = {}
    for number, axis in enumerate(slices.axes):
        if axis.normed and not all_axes:
            continue
        share = _mean_share(axis, [units[number] for units in unit_indices])
        scales |= {name: share * scales.get(name, 1.0) for name in unit_users(axis)}
    return scales


def start_scales(
    model: nn.Module, slices: Slices, unit_indices: Sequence[UnitIndices], small_branches: bool
) -> dict[str, float]:
    """What the tensors of a given network are divided by at the start.

    By `eval_scales`, so that the whole network is the given one. With `small_branches`, residual branches begin with
    1/n of their size: what a branch adds to the stream changes with every assignment, and large branches would drown
    the stream. Branches that no assignment changes, and tensors that blocks share, stay as they are.
    """
    scales = eval_scales(slices, unit_indices)
    if not small_branches:
        return scales
    share = _mean_share(slices.axes[0], [units[0] for units in unit_indices])
    deals_blocks = isinstance(slices.axes[0], ResidualBlocks)
    changing = [
        ends
        for block, ends in find_residual_blocks(model).branches.items()
        if deals_blocks or any(name.startswith(f"{block}.") and slices.is_divided(name) for name in slices.tensors)
    ]
    ends = [name for names in changing for name in names if name in slices.tensors]
    return scales | {name: scales.get(name, 1.0) / share for name in ends}


def _mean_share(axis: Axis | ResidualBlocks, of_ranks: Sequence[Tensor]) -> float:
    """The part of an axis' units that a rank has, on average."""
    return sum(len(units) for units in of_ranks) / (len(of_ranks) * axis.size)
