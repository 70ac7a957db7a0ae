"""AugLocal: a head made of copies of the layers that follow the block."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from thinwire.surgery.heads.base import Boundary, Head, LayerStack
from thinwire.surgery.heads.layers import copied_layers


def auglocal(
    depth: PositiveInt = 2,  # layers in the head of the first block; heads of later blocks have fewer, down to one
) -> Head:
    """Untrained copies of evenly spaced later layers, fewer of them for later blocks; for deep convolutional nets.

    Ma et al., "Scaling Supervised Local Learning with Augmented Auxiliary Networks", 2024.
    """

    def build(boundary: Boundary) -> nn.Module:
        last = len(boundary.segments) - 1
        wanted = round(depth * (1 - boundary.block / max(1, boundary.num_blocks - 1)))  # fewer in later blocks
        count = min(max(1, wanted), last)
        chosen = [-(-last * (i + 1) // count) - 1 for i in range(count)]  # evenly, and the last one of them
        return LayerStack(*copied_layers(boundary, [*chosen, last]))

    return Head(build)
