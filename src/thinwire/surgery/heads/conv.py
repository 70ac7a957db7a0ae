"""A small convolutional network as a head."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from thinwire.surgery.heads.base import Boundary, Head, LayerStack, shape_error


def conv(
    width: PositiveInt = 128,  # hidden units between the two linear layers
) -> Head:
    """A 3×3 convolution of stride 2, pooling and two linear layers; for images.

    Laskin et al., "Parallel Training of Deep Networks with Local Updates", 2020.
    """

    def build(boundary: Boundary) -> nn.Module:
        if boundary.z.ndim != 4 or boundary.output.ndim != 2:
            raise shape_error(boundary, "conv", "is for the classification of images")
        channels = boundary.z.shape[1]
        return LayerStack(
            nn.Conv2d(channels, channels, 3, 2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, width), nn.ReLU(),
            nn.Linear(width, boundary.output.shape[-1]),
        )  # fmt: skip

    return Head(build)
