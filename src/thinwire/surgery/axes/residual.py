"""Residual blocks x + branch(x) that can be left out of a network as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from thinwire.errors import UsageError
from thinwire.surgery.axes.axis import join_names
from thinwire.surgery.huggingface import known_branches


@dataclass(frozen=True)
class ResidualBlocks:
    """The residual blocks of a model by name, and for each the tensors that end its branches."""

    branches: Mapping[str, tuple[str, ...]]
    normed = False

    @property
    def size(self) -> int:
        return len(self.branches)

    @property
    def branch_ends(self) -> list[str]:
        """The tensors that end the branches of all blocks."""
        return [name for names in self.branches.values() for name in names]


def residual_blocks_of(model: nn.Module) -> ResidualBlocks:
    """The residual blocks of a model: the outermost modules with `thinwire_branches`, or that are known."""
    found = find_residual_blocks(model)
    if not found.size:
        raise UsageError(
            f"no residual blocks are found in {type(model).__name__}; a module that computes x + branch(x) declares "
            'the tensors that end its branch: thinwire_branches = ["conv2.weight", "conv2.bias"]; or try cut=units'
        )
    return found


def find_residual_blocks(model: nn.Module) -> ResidualBlocks:
    """The residual blocks of a model, which may have none."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        branches = getattr(module, "thinwire_branches", ()) or known_branches(module)
        if branches and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = tuple(join_names(name, tensor) for tensor in branches)
    return ResidualBlocks(found)
