"""Tiny models of Hugging Face's transformers, made from a config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import seeded

transformers = pytest.importorskip("transformers", reason="needs the extra thinwire[huggingface]")
transformers.logging.set_verbosity_error()

WORDS, LENGTH = 64, 12
TOKENS = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(dropout: float = 0.0, **options: Any) -> Any:
    """A GPT-2 of 4 blocks, with 4 heads of 8 features."""
    config = transformers.GPT2Config(
        n_positions=16, n_embd=32, n_layer=4, n_head=4, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        **TOKENS, **options,
    )  # fmt: skip
    return seeded(0, lambda: transformers.GPT2LMHeadModel(config))


def llama(dropout: float = 0.0, **options: Any) -> Any:
    """A Llama of 4 blocks, with 4 heads of 8 features; two heads share a key and a value."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.LlamaConfig(attention_dropout=dropout, **TOKENS, **sizes | options)
    return seeded(0, lambda: transformers.LlamaForCausalLM(config))


MODELS = {"gpt2": gpt2, "llama": llama}


class Logits(nn.Module):
    """A language model that returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


def tokens(size: int, seed: int = 0) -> Tensor:
    """Lines that count up from a random word: what comes next can be learned."""
    first = torch.randint(0, WORDS, (size, 1), generator=torch.Generator().manual_seed(seed))
    return (first + torch.arange(LENGTH)) % WORDS


def with_larger_weights(model: nn.Module) -> nn.Module:
    """The same model with weights and biases at which every part of it changes the output."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model
