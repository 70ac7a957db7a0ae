"""torch's attention, unpacked, factored and packed again, computes the same."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.surgery.attention import UnpackedAttention, unpack_attention
from thinwire.surgery.lowrank import Factored, decompose, factor, factorable_layers, set_factors
from thinwire.surgery.standard import to_standard_modules

E, HEADS = 12, 3


class Holder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, **options)


def lowered(model: nn.Module, rank: int | None) -> list[str]:
    """Factor every layer that can be, exactly if no rank is given."""
    names = factorable_layers(model)
    for name in names:
        layer = model.get_submodule(name)
        found = decompose(layer.weight)
        model.set_submodule(name, set_factors(factor(layer, rank or len(found.sigma)), found))
    return names


def masks(kind: str, batch: int, length: int, keys: int) -> dict[str, Tensor]:
    boolean = torch.rand(length, keys) < 0.3
    boolean[:, 0] = False
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, -2:] = True
    return {
        "none": {},
        "boolean": {"attn_mask": boolean},
        "added": {"attn_mask": torch.randn(length, keys)},
        "per head": {"attn_mask": torch.randn(batch * HEADS, length, keys)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": boolean, "key_padding_mask": padding},
    }[kind]


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("kind", ["none", "boolean", "added", "per head", "padding", "both"])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}])
def test_unpacked_attention_computes_the_same(options: dict[str, Any], kind: str, thin: bool) -> None:
    torch.manual_seed(0)
    holder = Holder(**options)
    nn.init.normal_(holder.attention.out_proj.weight)
    reference = copy.deepcopy(holder.attention)
    unpack_attention(holder)
    if thin:
        for name in ("attention.in_proj", "attention.out_proj"):
            layer = holder.get_submodule(name)
            found = decompose(layer.weight)
            holder.set_submodule(name, set_factors(factor(layer, len(found.sigma)), found))
    x, memory = torch.randn(5, 4, E), torch.randn(7, 4, E)
    if options.get("batch_first"):
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    for query, key in ((x, x), (x, memory)):
        length, keys = (x.shape[1], key.shape[1]) if options.get("batch_first") else (len(x), len(key))
        given = masks(kind, 4, length, keys)
        for extra in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            expected = reference(query, key, key, **given, **extra)
            found = holder.attention(query, key, key, **given, **extra)
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_mode_and_sizes_stay_and_a_hint_without_a_mask_is_refused() -> None:
    holder = Holder(dropout=0.5).eval()
    unpack_attention(holder)
    assert not holder.attention.training
    assert (holder.attention.embed_dim, holder.attention.head_dim) == (E, E // HEADS)
    x = torch.randn(5, 4, E)
    with pytest.raises(RuntimeError, match="is_causal needs attn_mask"):
        holder.attention(x, x, x, is_causal=True)


def test_inputs_without_a_batch() -> None:
    holder = Holder(batch_first=True)
    reference = copy.deepcopy(holder.attention)
    unpack_attention(holder)
    x, padding = torch.randn(5, E), torch.tensor([False, False, False, True, True])
    for one, other in zip(
        reference(x, x, x, key_padding_mask=padding), holder.attention(x, x, x, key_padding_mask=padding), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_parameters_stay_the_same_ones_and_gradients_agree() -> None:
    holder = Holder(dropout=0.0)
    reference = copy.deepcopy(holder.attention)
    weight = holder.attention.in_proj_weight
    unpack_attention(holder)
    assert holder.attention.in_proj.weight is weight
    x = torch.randn(5, 4, E)
    reference(x, x, x)[0].square().sum().backward()
    holder.attention(x, x, x)[0].square().sum().backward()
    torch.testing.assert_close(weight.grad, reference.in_proj_weight.grad)


def test_attention_that_cannot_be_unpacked_is_left_alone() -> None:
    for options in ({"kdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        holder = Holder(**options)
        unpack_attention(holder)
        assert type(holder.attention) is nn.MultiheadAttention
    normed = Holder()
    nn.utils.parametrizations.spectral_norm(normed.attention.out_proj)
    unpack_attention(normed)
    assert isinstance(normed.attention, nn.MultiheadAttention)
    shared = Holder()
    shared.again = shared.attention
    unpack_attention(shared)
    assert type(shared.attention) is nn.MultiheadAttention


def transformer(batch_first: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 4, 40, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(nn.Linear(E, E), nn.TransformerEncoder(layer, 2), nn.Linear(E, 2))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_after_surgery_and_back(batch_first: bool, training: bool) -> None:
    model = transformer(batch_first)
    original = copy.deepcopy(model).train(training)
    unpack_attention(model)
    model.train(training)
    assert len(lowered(model, None)) == 8
    x = torch.randn(3, 5, E)
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    ordinary = to_standard_modules(copy.deepcopy(model))
    assert not any(type(m).__module__.startswith("thinwire") for m in ordinary.modules())
    with torch.no_grad():
        torch.testing.assert_close(ordinary(x), original(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ordinary(x), original(x), rtol=1e-4, atol=1e-5)


def test_a_standard_model_is_as_small_as_the_factored_one() -> None:
    model = transformer()
    unpack_attention(model)
    lowered(model, 2)
    size = sum(p.numel() for p in model.parameters())
    ordinary = to_standard_modules(copy.deepcopy(model))
    assert sum(p.numel() for p in ordinary.parameters()) == size
    assert sum(t.numel() for t in ordinary.state_dict().values()) == size
    x = torch.randn(3, 5, E)
    torch.testing.assert_close(ordinary(x), model(x), rtol=1e-4, atol=1e-5)


def test_without_attention_a_standard_model_is_made_of_sequentials() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    lowered(model, 2)
    assert isinstance(model[1], Factored)
    ordinary = to_standard_modules(model)
    assert type(ordinary[1]) is nn.Sequential
    assert list(ordinary.state_dict()) == [
        "0.weight", "0.bias", "1.down.weight", "1.up.weight", "1.up.bias", "2.weight", "2.bias"
    ]  # fmt: skip
    pickle.dumps(ordinary)


def test_unpacked_attention_packs_to_torchs_own() -> None:
    model = transformer()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    unpack_attention(model)
    assert any(isinstance(m, UnpackedAttention) for m in model.modules())
    after = to_standard_modules(model)
    assert list(after.state_dict()) == list(before)
    assert all(torch.equal(after.state_dict()[name], t) for name, t in before.items())
    assert type(after[1].layers[0].self_attn) is nn.MultiheadAttention


def recipe() -> Any:
    """The function in the documentation that loads a factored model without thinwire."""
    page = (Path(__file__).parent.parent.parent / "docs" / "ab.md").read_text()
    block = next(b for b in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "def factor(" in b)
    names: dict[str, Any] = {"torch": torch}
    exec(block.partition("\n\n\ntensors =")[0], names)
    return names["factor"]


class WithDown(nn.Module):
    """A layer of the user's own that is called down, beside convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3)
        self.block = nn.ModuleDict(
            {"down": nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), "up": nn.Conv2d(8, 8, 1)}
        )
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block["up"](self.block["down"](self.first(x))))


@pytest.mark.parametrize(("model", "shape"), [(transformer(), (3, 5, E)), (WithDown(), (2, 1, 9, 9))])
@pytest.mark.parametrize("rank", [2, 3])
def test_the_recipe_of_the_docs_loads_factored_models(model: nn.Module, shape: tuple[int, ...], rank: int) -> None:
    small, empty = copy.deepcopy(model), copy.deepcopy(model)
    unpack_attention(small)
    assert lowered(small, rank)
    small = to_standard_modules(small)
    recipe()(empty, small.state_dict())
    x = torch.randn(shape)
    assert torch.equal(empty(x), small(x))
