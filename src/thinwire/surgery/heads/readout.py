"""Readout: a head that ends with a copy of the model's own last layer."""

from __future__ import annotations

import copy

from pydantic import PositiveInt
from torch import Tensor, nn

from thinwire.surgery.heads.base import Boundary, Head, HeadModule
from thinwire.surgery.heads.layers import adapter_layers, copied_layers, example_output


def readout(
    every: PositiveInt = 10,  # steps between two copies of the last layer; lower = fresher, more bytes
) -> Head:
    """A trained copy of the model's last layer but one, then a frozen copy of its last layer, renewed now and then.

    For language models: all blocks predict the same words as the last one, and no block trains an unembedding of its
    own.
    """

    def build(boundary: Boundary) -> nn.Module:
        last = len(boundary.segments) - 1
        private = nn.Sequential(*copied_layers(boundary, range(max(0, last - 1), last)))
        return Readout(private, boundary, every)

    return Head(build)


class Readout(HeadModule):
    """A private layer, then a copy of the model's last segment, which the last block sends every `every` steps."""

    def __init__(self, private: nn.Sequential, boundary: Boundary, every: int) -> None:
        super().__init__()
        self.private = private
        private_output = example_output(private, boundary.z)
        self.adapter = nn.Sequential(*adapter_layers(private_output, boundary.segment_inputs[-1]))
        self.last_segment = copy.deepcopy(boundary.segments[-1]).requires_grad_(False)
        self.every = every

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.last_segment(self.adapter(self.private(z)))
        return out
