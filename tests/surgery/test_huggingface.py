"""Layers of Hugging Face's models: factored, narrowed, and as they were again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.surgery.hf_models import MODELS, Logits, gpt2, llama, tokens, transformers, with_larger_weights
from tests.surgery.test_narrow import masked, parts_of
from tests.training import seeded
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.axes.residual import residual_blocks_of
from thinwire.surgery.huggingface import is_transposed_linear
from thinwire.surgery.low_rank_model import find_low_rank_layers, give_low_rank_layers, merge_low_rank_layers
from thinwire.surgery.lowrank import Factored, decompose, factor, factorable_layers, merge, set_factors, weight_matrix
from thinwire.surgery.meta import to_meta
from thinwire.surgery.moments import rotate_state
from thinwire.surgery.narrow import narrow_network
from thinwire.surgery.slices import Slices, take_slice
from thinwire.surgery.standard import to_standard_modules
from thinwire.surgery.unit_assignment import assign_units

from transformers.pytorch_utils import Conv1D  # isort: skip  # after hf_models, which skips without transformers

SHAPES = {"tall": (6, 20), "wide": (20, 6), "square": (9, 9)}  # inputs, outputs


def transposed(shape: str) -> Conv1D:
    inputs, outputs = SHAPES[shape]
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def split(layer: Conv1D, layer_rank: int | None = None) -> Factored:
    found = decompose(weight_matrix(layer))
    return set_factors(factor(layer, layer_rank or len(found.sigma)), found)


# ---- low-rank layers


@pytest.mark.parametrize("shape", SHAPES)
def test_a_transposed_layer_is_two_thin_ones_and_itself_again(shape: str) -> None:
    layer = transposed(shape).eval()
    before = torch.get_rng_state()
    thin = split(layer)
    assert torch.equal(torch.get_rng_state(), before)
    assert (type(thin.down), type(thin.up), thin.up.nx) == (nn.Linear, Conv1D, thin.layer_rank)
    assert (thin.nx, thin.nf) == (layer.nx, layer.nf)
    assert thin.bias is layer.bias
    assert not thin.training
    x = torch.randn(5, 3, layer.nx)
    torch.testing.assert_close(thin(x), layer(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(thin.weight, layer.weight, rtol=1e-5, atol=1e-5)
    whole = merge(thin)
    assert type(whole) is Conv1D
    assert (str(whole), whole.training) == (str(layer), False)
    assert whole.weight.shape == layer.weight.shape
    torch.testing.assert_close(whole(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_of_a_transposed_layer_too_a_is_the_factor_of_the_longer_side(shape: str) -> None:
    thin = split(transposed(shape), 2)
    sides = SHAPES[shape]
    assert (thin.A.numel(), thin.B.numel(), thin.layer_rank) == (2 * max(sides), 2 * min(sides), 2)
    assert {id(thin.A), id(thin.B)} == {id(thin.up.weight), id(thin.down.weight)}


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_of_a_transposed_layer_rotate_as_those_of_a_linear_one(shape: str) -> None:
    layer = transposed(shape)
    straight = nn.Linear(layer.nx, layer.nf)
    straight.weight.data, straight.bias.data = layer.weight.data.T.clone(), layer.bias.data.clone()
    thin = split(layer, 3)
    expected = set_factors(factor(straight, 3), decompose(straight.weight))
    moments = {"exp_avg": torch.randn_like(layer.weight), "exp_avg_sq": torch.rand_like(layer.weight)}
    up, down = rotate_state({**moments, "step": torch.tensor(3.0)}, thin)
    wanted_up, wanted_down = rotate_state({name: value.T.contiguous() for name, value in moments.items()}, expected)
    for name in moments:
        torch.testing.assert_close(up[name], wanted_up[name].T)
        torch.testing.assert_close(down[name], wanted_down[name])
        assert (up[name].shape, down[name].shape) == (thin.up.weight.shape, thin.down.weight.shape)


def test_every_layer_inside_the_blocks_can_be_factored_and_tied_tables_stay() -> None:
    names = {
        "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
        "llama": [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))],
    }
    for name, make in MODELS.items():
        at = {"gpt2": "transformer.h", "llama": "model.layers"}[name]
        wanted = [f"{at}.{i}.{layer}" for i in range(4) for layer in names[name]]
        assert factorable_layers(make()) == wanted
        assert factorable_layers(make(tie_word_embeddings=name == "llama")) == wanted  # the other way round
    assert factorable_layers(gpt2().transformer)[-1] == "h.3.mlp.c_fc", "without a head its own last layer stays"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_low_rank_layers_has_its_own_layers_again(name: str) -> None:
    model = with_larger_weights(MODELS[name]())
    full, x = copy.deepcopy(model).eval(), tokens(3)
    ranks = dict.fromkeys(factorable_layers(model), 5)
    for layer in ranks:
        found = model.get_submodule(layer)
        model.set_submodule(layer, set_factors(factor(found, 5), decompose(weight_matrix(found))))
    small = to_standard_modules(model.eval())
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in full.parameters())
    found = find_low_rank_layers(small, list(ranks))
    assert found.layer_ranks == ranks
    again = give_low_rank_layers(MODELS[name](), found).eval()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x).logits, small(x).logits)
    merged = merge_low_rank_layers(again, found)
    torch.testing.assert_close(merged(x).logits, small(x).logits, rtol=1e-4, atol=1e-4)
    assert [(n, type(m)) for n, m in merged.named_modules()] == [(n, type(m)) for n, m in full.named_modules()]
    assert [(n, p.shape) for n, p in merged.named_parameters()] == [(n, p.shape) for n, p in full.named_parameters()]
    full.load_state_dict(merged.state_dict())
    assert torch.equal(full(x).logits, merged(x).logits)
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == (name == "gpt2"), "tied as before"


def test_only_a_layer_with_the_shapes_of_a_transposed_one_is_one() -> None:
    layer = transposed("tall")
    assert is_transposed_linear(layer)
    assert not is_transposed_linear(nn.Linear(6, 20))
    assert not is_transposed_linear(nn.Conv1d(6, 20, 1))
    layer.nx = 7
    assert not is_transposed_linear(layer)


# ---- narrow networks

NETS = {
    "gpt2": (lambda: gpt2(), [4, 128] * 4),
    "gpt2, eager": (lambda: gpt2(attn_implementation="eager", n_inner=40), [4, 40] * 4),
    "gpt2, own scaling": (
        lambda: gpt2(
            attn_implementation="eager", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True,
            activation_function="relu",
        ),
        [4, 128] * 4,
    ),
    "llama": (lambda: llama(), [2, 64] * 4),
    "llama with biases": (lambda: llama(attention_bias=True, mlp_bias=True), [2, 64] * 4),
    "llama, eager": (lambda: llama(attn_implementation="eager", num_key_value_heads=4, head_dim=6), [4, 64] * 4),
    "mistral": (lambda: relative("Mistral", sliding_window=4), [2, 64] * 4),
    "qwen3": (lambda: relative("Qwen3", head_dim=8), [2, 64] * 4),
}  # fmt: skip


def relative(name: str, **options: object) -> nn.Module:
    """A model whose parts are named as Llama's."""
    sizes = llama().config.to_dict()
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **{key: sizes[key] for key in kept}, **options)
    return seeded(0, lambda: getattr(transformers, f"{name}ForCausalLM")(config))


def net_of(name: str) -> nn.Module:
    return Logits(with_larger_weights(NETS[name][0]())).eval()


@pytest.mark.parametrize("name", NETS)
def test_axes_of_heads_and_hidden_units_are_found(name: str) -> None:
    assert [axis.size for axis in axes_of(net_of(name))] == NETS[name][1]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_a_narrow_network_is_the_whole_one_without_the_units_of_others(name: str, scaled: bool) -> None:
    net, x = net_of(name), tokens(3)
    slices = Slices(net, axes_of(net))
    slices.check(net, 2, scaled)
    empty = copy.deepcopy(net)
    to_meta(empty)
    seen = []
    for unit_indices in assign_units([axis.size for axis in slices.axes], [1, 1], 0, 0):
        parts = parts_of(net, slices, unit_indices)
        small = narrow_network(empty, slices, unit_indices, parts, scaled)
        seen.append(small(x))
        torch.testing.assert_close(seen[-1], masked(net, slices, unit_indices, scaled)(x), rtol=1e-4, atol=1e-4)
        assert slices.num_elements(unit_indices) == sum(t.numel() for t in parts.values())
        for module in small.modules():
            assert not hasattr(module, "nf") or is_transposed_linear(module), "sizes fit the narrow weights"
            assert type(module) is not nn.Linear or module.weight.shape == (module.out_features, module.in_features)
    assert not torch.allclose(*seen), "the units matter"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_training_a_narrow_network_is_training_the_masked_whole_one(name: str) -> None:
    net, x = net_of(name).double(), tokens(3)
    slices = Slices(net, axes_of(net))
    for unit_indices in assign_units([axis.size for axis in slices.axes], [1, 1], 0, 0):
        small = narrow_network(net, slices, unit_indices, parts_of(net, slices, unit_indices), scaled=False)
        whole = masked(net, slices, unit_indices)
        for some in (small, whole):
            some(x).square().sum().backward()
        of_whole = {key: p.grad for key, p in whole.named_parameters()}
        for key, parameter in small.named_parameters():
            wanted = take_slice(of_whole[key], slices.slice_index(key, unit_indices) or ())
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama with biases", "mistral"])
@torch.no_grad()
def test_a_block_without_the_ends_of_its_branches_passes_its_input_on(name: str) -> None:
    net = net_of(name)
    blocks = residual_blocks_of(net)
    assert blocks.size == 4
    for path, ends in blocks.branches.items():
        seen: list[Tensor] = []
        hook = net.get_submodule(path).register_forward_hook(
            lambda module, args, out, seen=seen: seen.extend((args[0], out))
        )
        net(tokens(2))
        assert not torch.equal(*seen)
        for end in ends:
            net.get_parameter(end).zero_()
        net(tokens(2))
        hook.remove()
        assert torch.equal(*seen[2:])


def test_what_only_looks_like_them_is_left_whole() -> None:
    """A norm over all heads at once, a second norm behind the branch, weights between them: units are not alone."""
    norm_over_heads = Logits(relative("Olmo2"))
    assert {axis.size for axis in axes_of(norm_over_heads)} == {64}, "the hidden units of its MLPs alone"
    more_norms = relative("Gemma2", head_dim=8)
    with pytest.raises(Exception, match="no residual blocks"):
        residual_blocks_of(more_norms)
    odd = llama()
    odd.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(8))
    odd.model.layers[1].self_attn.q_proj.weight = odd.model.layers[2].self_attn.q_proj.weight
    assert [axis.size for axis in axes_of(odd)] == [64, 64, 64, 2, 64]


def gemma3n(sparsity: float, shared: int) -> nn.Module:
    """Its MLPs may keep the largest of their units alone, and its last layers may use the keys of others."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=[64] * 4, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        activation_sparsity_pattern=[sparsity] * 4, num_kv_shared_layers=shared, layer_types=["full_attention"] * 4,
        laurel_rank=4, altup_num_inputs=2, pad_token_id=0,
    )  # fmt: skip
    return seeded(0, lambda: transformers.Gemma3nForCausalLM(config))


@pytest.mark.parametrize(("sparsity", "shared", "sizes"), [(0.0, 0, {2, 64}), (0.9, 0, {2}), (0.0, 2, {64})])
@torch.no_grad()
def test_units_that_others_depend_on_are_left_whole(sparsity: float, shared: int, sizes: set[int]) -> None:
    net, x = Logits(with_larger_weights(gemma3n(sparsity, shared))).eval(), tokens(3)
    slices = Slices(net, axes_of(net))
    assert {axis.size for axis in slices.axes} == sizes
    for unit_indices in assign_units([axis.size for axis in slices.axes], [1, 1], 0, 0):
        small = narrow_network(net, slices, unit_indices, parts_of(net, slices, unit_indices), scaled=False)
        torch.testing.assert_close(small(x), masked(net, slices, unit_indices)(x), rtol=1e-4, atol=1e-4)
