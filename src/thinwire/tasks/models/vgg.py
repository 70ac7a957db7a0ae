"""VGG networks: stages of 3×3 convolutions, each of which ends with a pooling layer that halves the image."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from thinwire.errors import UsageError
from thinwire.tasks.models.cnn import image_shape


def vgg16(
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    classifier: NonNegativeInt = 0,  # units in each of two hidden layers at the end; 0 = no layers, 4096 = as published
    places: PositiveInt = 1,  # pixels per side after pooling; 7 = as published (134 M parameters with classifier=4096)
) -> nn.Sequential:
    """VGG16 with BatchNorm: 14.7 M parameters without hidden classifier layers.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015.
    """
    layers, channels = _stages("vgg16", shape, [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)])
    layers += [nn.AdaptiveAvgPool2d(places), nn.Flatten()]
    features = channels * places**2
    for _ in range(2 if classifier else 0):
        layers += [nn.Linear(features, classifier), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        features = classifier
    return nn.Sequential(*layers, nn.Linear(features, classes))


def vgg8(
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    width: PositiveInt = 32,  # channels of the first stage; each later stage has twice as many as the one before
) -> nn.Sequential:
    """A small VGG for images from 8×8: six convolutions with BatchNorm and one hidden layer, 0.3 M parameters."""
    layers, channels = _stages("vgg8", shape, [(width, 2), (2 * width, 2), (4 * width, 2)])
    hidden = [nn.Linear(channels, channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *hidden, nn.Linear(channels, classes))


def _stages(name: str, shape: tuple[int, ...], stages: Sequence[tuple[int, int]]) -> tuple[list[nn.Module], int]:
    """The layers of stages, given as (channels, convolutions), and the number of channels at their end."""
    channels, height, width = image_shape(name, shape)
    if min(height, width) < 2 ** len(stages):
        times, least = {3: "three", 5: "five"}[len(stages)], 2 ** len(stages)
        raise UsageError(
            f"{name} halves the image {times} times and needs {least}×{least} pixels; this task has {height}×{width}"
        )
    layers: list[nn.Module] = []
    for outputs, num_convolutions in stages:
        for _ in range(num_convolutions):
            convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return layers, channels
