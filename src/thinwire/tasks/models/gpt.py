"""A small GPT."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt
from torch import nn

from thinwire.errors import UsageError
from thinwire.tasks.models.transformer import Block, PositionEmbedding, check_heads, init_gpt2_weights


def gpt(
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    width: PositiveInt = 128,  # embedding dimension
    depth: PositiveInt = 4,  # transformer blocks
    heads: PositiveInt = 4,  # attention heads per block
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,  # dropout probability
) -> nn.Sequential:
    """A decoder-only transformer over token numbers: 0.83 M parameters on characters.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    if len(shape) != 1:
        raise UsageError(f"gpt takes sequences of tokens; this task's inputs are {shape}; try vit, cnn or mlp")
    check_heads("gpt", width, heads)
    return nn.Sequential(
        nn.Embedding(classes, width),
        PositionEmbedding(shape[0], width),
        *(Block(width, heads, causal=True, dropout=dropout) for _ in range(depth)),
        nn.LayerNorm(width),
        nn.Linear(width, classes, bias=False),
    ).apply(init_gpt2_weights)
