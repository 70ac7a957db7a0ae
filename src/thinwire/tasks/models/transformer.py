"""The transformer block that the GPT and the ViT share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.surgery.axes.axis import Axis


class Block(nn.Module):
    """x ← x + attention(norm(x)); x ← x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    @property
    def thinwire_axes(self) -> list[Axis]:
        """The attention heads; the hidden units of the MLP are found in its nn.Sequential."""
        return [Axis(self.heads, {"qkv.weight": (0, 3), "qkv.bias": (0, 3)}, {"out.weight": 1}, {"heads": 1})]

    @property
    def thinwire_branches(self) -> list[str]:
        return ["out.weight", "out.bias", "mlp.2.weight", "mlp.2.bias"]


def check_heads(model: str, width: int, heads: int) -> None:
    """Raise UsageError unless the heads divide the width."""
    if width % heads:
        fitting = [h for h in range(1, width + 1) if width % h == 0 and h <= 16]
        raise UsageError(f"{model}: heads={heads} does not divide width={width}; try one of {fitting}")


def init_gpt2_weights(module: nn.Module) -> None:
    """Initialize as GPT-2: normal weights with a standard deviation of 0.02, and zero biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class PositionEmbedding(nn.Module):
    """Adds a learned vector to each position of a sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]
