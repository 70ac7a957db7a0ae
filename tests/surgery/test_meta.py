"""Tensors taken out of a model, put back, and made for models on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import registry
from thinwire.common.tensors import named_tensors
from thinwire.surgery.meta import initial_tensors, to_meta, with_tensors


def test_tied_weights_stay_tied_and_caches_stay_there() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight
            self.register_buffer("cache", torch.ones(3), persistent=False)
            self.register_buffer("kept", torch.ones(3))
            self.out.weight.requires_grad_(False)

    net = Tied()
    taken = to_meta(net)
    assert taken.keys() == {"embed.weight", "kept"}
    assert net.embed.weight.is_meta
    assert not net.cache.is_meta
    again = with_tensors(net, taken)
    assert again.out.weight is again.embed.weight
    assert not again.out.weight.requires_grad
    assert again.cache.equal(torch.ones(3))


def test_a_model_without_tensors_begins_as_if_it_had_them() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))

    torch.manual_seed(5)
    real = build()
    with torch.device("meta"):
        empty = build()
    torch.manual_seed(5)
    found = initial_tensors(empty, torch.device("cpu"))
    assert all(t.is_meta for t in named_tensors(empty).values())
    assert found.keys() == named_tensors(real).keys()
    assert all(torch.equal(found[name], t) for name, t in named_tensors(real).items())
    with torch.device("meta"):
        odd = nn.Sequential(registry.build("models", "vit(width=24, depth=1, heads=4)", (1, 8, 8), 3))
    with pytest.raises(tw.UsageError, match=r"PositionEmbedding.*reset_parameters"):
        initial_tensors(odd, torch.device("cpu"))
