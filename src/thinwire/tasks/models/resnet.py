"""Residual networks for 32×32 images: ResNet-18 and -50 with a small stem, and the thin ResNet-32 of CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from thinwire.tasks.models.cnn import image_shape


def resnet18(shape: tuple[int, ...], classes: int, /) -> nn.Module:
    """ResNet-18 with a 3×3 stem for small images: 11.2 M parameters.

    He et al., "Deep Residual Learning for Image Recognition", 2016.
    """
    return _resnet("resnet18", shape, classes, (64, 128, 256, 512), (2, 2, 2, 2), expansion=1)


def resnet32(shape: tuple[int, ...], classes: int, /) -> nn.Module:
    """The thin 32-layer ResNet made for CIFAR-10: 0.47 M parameters."""
    return _resnet("resnet32", shape, classes, (16, 32, 64), (5, 5, 5), expansion=1)


def resnet50(shape: tuple[int, ...], classes: int, /) -> nn.Module:
    """ResNet-50 with a 3×3 stem for small images: 23.5 M parameters."""
    return _resnet("resnet50", shape, classes, (64, 128, 256, 512), (3, 4, 6, 3), expansion=4)


def _resnet(
    name: str, shape: tuple[int, ...], classes: int, widths: Sequence[int], depths: Sequence[int], expansion: int
) -> nn.Module:
    channels = image_shape(name, shape)[0]
    layers: list[nn.Module] = [*_conv_norm(channels, widths[0], 3), nn.ReLU(inplace=True)]
    channels = widths[0]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(depth):
            stride = 2 if stage and i == 0 else 1
            layers.append(Residual(channels, width, expansion, stride))
            channels = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    """x ← relu(body(x) + shortcut(x)): two 3×3 convolutions, or 1×1, 3×3, 1×1 where the expansion is 4."""

    def __init__(self, inputs: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            body = [*_conv_norm(inputs, width, 3, stride), nn.ReLU(inplace=True), *_conv_norm(width, outputs, 3)]
        else:
            body = [
                *_conv_norm(inputs, width, 1), nn.ReLU(inplace=True),
                *_conv_norm(width, width, 3, stride), nn.ReLU(inplace=True),
                *_conv_norm(width, outputs, 1),
            ]  # fmt: skip
        self.body = nn.Sequential(*body)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv_norm(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))

    @property
    def thinwire_branches(self) -> list[str]:
        """The tensors that end the branch; none if the block changes the image's size, and so cannot be left out."""
        last = len(self.body) - 1
        return [f"body.{last}.weight", f"body.{last}.bias"] if isinstance(self.shortcut, nn.Identity) else []


def _conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs)]
