"""Models as people write them, with nothing in an nn.Sequential."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.surgery.axes.find import axes_of


class Fused(nn.Module):
    """Attention whose queries, keys and values are made at once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Grouped(nn.Module):
    """Attention with fewer keys and values than queries, or as many."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (m(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for m in (self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        out: Tensor = self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(nn.functional.gelu(self.c_fc(x)))
        return out


class Gate(nn.Module):
    """Llama's feed-forward part, in the order of its first authors: the one in the middle takes the units in."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.down_proj, self.up_proj = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, hidden), (hidden, width), (width, hidden))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Transformer(nn.Module):
    """Layers, and what comes of their last place."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.h = nn.ModuleList(layers)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        out: Tensor = self.head(x[:, -1])
        return out


class Plain(nn.Module):
    """Layers as attributes, two of them behind the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x))))).mean(1)
        return out


def gpt() -> nn.Module:
    return Transformer(*(Layer(12, Fused(12, 4), FeedForward(12, 20)) for _ in range(2)))


def llama() -> nn.Module:
    return Transformer(*(Layer(12, Grouped(12, 4, 4), Gate(12, 20)) for _ in range(2)))


def grouped() -> nn.Module:
    return Transformer(Layer(12, Grouped(12, 4, 2), Gate(12, 20)))


def attention_alone(grouped: bool = False) -> nn.Module:
    return Transformer(Layer(12, Grouped(12, 4, 2) if grouped else Fused(12, 4), nn.Identity()))


def with_heads(*, fused: bool) -> nn.Module:
    """Attention that declares its heads, as docs/ist.md tells; queries that share a key are one unit."""
    model = attention_alone(not fused)
    attention = model.get_submodule("h.0.attn")
    axis = (
        tw.Axis(4, {"qkv.weight": (0, 3), "qkv.bias": (0, 3)}, {"o.weight": 1}, {"heads": 1})
        if fused
        else tw.Axis(
            2, dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), 0), {"o_proj.weight": 1},
            {"heads": 2, "kv_heads": 1},
        )
    )  # fmt: skip
    attention.thinwire_axes = [axis]  # type: ignore[assignment]
    return model


def suggestion(model: nn.Module) -> str:
    """What the error tells to type."""
    with pytest.raises(tw.UsageError) as caught:
        axes_of(model)
    found = re.search(r"model\.thinwire_axes = .*\]", str(caught.value))
    return found.group() if found else ""


def with_suggestion(model: nn.Module) -> nn.Module:
    """The model after that was typed."""
    line = suggestion(model)
    assert line
    exec(line, {"model": model, "tw": tw})
    return model
