"""VGG16 for 32×32 images."""

from __future__ import annotations

from pydantic import NonNegativeInt
from torch import nn

from thinwire.errors import UsageError
from thinwire.tasks.models.cnn import image_shape

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: halve the image


def vgg16(
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    classifier: NonNegativeInt = 0,  # units of two hidden layers at the end; 0 = none, 4096 = as published
) -> nn.Sequential:
    """VGG16 with BatchNorm: 14.7 M parameters without hidden classifier layers.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015.
    """
    channels, height, width = image_shape("vgg16", shape)
    if min(height, width) < 32:
        raise UsageError(f"vgg16 halves the image five times and needs 32×32 pixels; this task has {height}×{width}")
    layers: list[nn.Module] = []
    for outputs in CHANNELS:
        if outputs:
            convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            channels = outputs
        else:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    for _ in range(2 if classifier else 0):
        layers += [nn.Linear(channels, classifier), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        channels = classifier
    return nn.Sequential(*layers, nn.Linear(channels, classes))
