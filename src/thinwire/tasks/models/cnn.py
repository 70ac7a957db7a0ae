"""A small convolutional network."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from thinwire.errors import UsageError


def cnn(
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    width: PositiveInt = 32,  # channels of the first layer; the second has twice as many
) -> nn.Sequential:
    """Two 3×3 convolutions with BatchNorm and pooling, then one hidden layer; for images of any size."""
    image_shape("cnn", shape)
    return nn.Sequential(
        *_stage(shape[0], width),
        *_stage(width, 2 * width),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, classes),
    )


def _stage(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


def image_shape(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width; UsageError if the inputs are not images."""
    if len(shape) != 3:
        raise UsageError(f"{model} takes images (channels, height, width); this task's inputs are {shape}; try mlp")
    return shape[0], shape[1], shape[2]
