"""A small vision transformer."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.tasks.models.cnn import image_shape
from thinwire.tasks.models.transformer import Block, PositionEmbedding, check_heads, init_gpt2_weights


def vit(
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    patch: PositiveInt = 4,  # pixels per side of a patch; smaller = more compute
    width: PositiveInt = 192,  # embedding dimension
    depth: PositiveInt = 6,  # transformer blocks
    heads: PositiveInt = 6,  # attention heads per block
) -> nn.Sequential:
    """A vision transformer for small images: 2.7 M parameters on CIFAR-10.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021.
    """
    channels, height, image_width = image_shape("vit", shape)
    if height % patch or image_width % patch:
        raise UsageError(f"vit: patch={patch} does not divide images of {height}×{image_width}; try 2 or 4")
    check_heads("vit", width, heads)
    return nn.Sequential(
        nn.Conv2d(channels, width, patch, patch),
        ToSequence(),
        PositionEmbedding((height // patch) * (image_width // patch), width),
        *(Block(width, heads, causal=False) for _ in range(depth)),
        nn.LayerNorm(width),
        MeanOverPositions(),
        nn.Linear(width, classes),
    ).apply(init_gpt2_weights)


class ToSequence(nn.Module):
    """(batch, channels, height, width) → (batch, positions, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class MeanOverPositions(nn.Module):
    """(batch, positions, channels) → (batch, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
