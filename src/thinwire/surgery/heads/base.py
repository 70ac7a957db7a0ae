"""What a head is: the boundary where it sits, the module that it becomes, and the loss that trains its block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from thinwire.errors import UsageError

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Boundary(NamedTuple):
    """The end of a block, where a head is put, with example tensors of a small batch."""

    z: Tensor  # the block's output
    output: Tensor  # the model's output
    segments: Sequence[nn.Module]  # the model's segments behind the boundary; the last one makes the output
    segment_inputs: Sequence[Tensor]  # the input of each of them
    block: int  # number of the block, from 0
    num_blocks: int


class Head(NamedTuple):
    """A kind of head: `build` makes the module for a boundary."""

    build: Callable[[Boundary], nn.Module]


class HeadModule(nn.Module):
    """A head: maps a block's output z to an output like the model's, and computes the loss that the block trains on."""

    def loss(self, z: Tensor, targets: Tensor, loss: LossFunction) -> Tensor:
        """The loss that the block and its head minimize."""
        return loss(self(z), targets)

    def training_forward(self, z: Tensor) -> Tensor:
        """A scalar that depends on everything that training computes, for counting operations."""
        out: Tensor = self(z)
        return out.sum()


class LayerStack(HeadModule):
    """A head of layers that run one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.layers(z)
        return out


def shape_error(boundary: Boundary, name: str, purpose: str) -> UsageError:
    """The error for a head that does not fit the shapes at a boundary; `purpose` says what the head is for."""
    return UsageError(
        f"head={name} {purpose}; block {boundary.block + 1} passes on {tuple(boundary.z.shape[1:])} and the model's "
        f"output is {tuple(boundary.output.shape[1:])}; try another of `thinwire list heads`, or your own: "
        "head=own('package.module:function')"
    )
