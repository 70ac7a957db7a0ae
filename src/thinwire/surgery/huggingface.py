"""Parts of Hugging Face's transformers, known by their names and shapes: transformers itself is not imported.

GPT-2's attention, MLPs and blocks, and those of Llama, Mistral, Qwen and others that are named alike.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from thinwire.surgery.axes.axis import Axis, UnitDim

BRANCHES = {  # the children of a residual block, and the layers that end its branches
    frozenset({"ln_1", "attn", "ln_2", "mlp"}): ("attn.c_proj", "mlp.c_proj"),
    frozenset({"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}): (
        "self_attn.o_proj",
        "mlp.down_proj",
    ),
}
HEAD_NORMS = {"q_norm", "k_norm"}  # norms over the features of each head, with weights that all heads share


class TransposedLinear(nn.Module):
    """For type checkers: transformers' Conv1D, a linear layer y = x·W + b with a weight of (inputs, outputs)."""

    nx: int  # inputs
    nf: int  # outputs
    weight: Tensor
    bias: Tensor


def is_transposed_linear(module: nn.Module) -> TypeGuard[TransposedLinear]:
    """Whether a module is transformers' Conv1D, which GPT-2 is made of."""
    if type(module).__name__ != "Conv1D" or list(module._parameters) != ["weight", "bias"]:
        return False
    weight, bias = module._parameters.values()
    sizes = getattr(module, "nx", None), getattr(module, "nf", None)
    return weight is not None and bias is not None and tuple(weight.shape) == sizes and tuple(bias.shape) == sizes[1:]


def resize_transposed(layer: TransposedLinear, inputs: int) -> TransposedLinear:
    """A layer like another one, with its bias and another number of inputs; its weight is not initialized."""
    weight = nn.Parameter(torch.empty(inputs, layer.nf, dtype=layer.weight.dtype, device=layer.weight.device))
    made = copy.deepcopy(layer, {id(layer.weight): weight, id(layer.bias): layer.bias})
    made.nx = inputs
    return made


def known_axes(module: nn.Module) -> list[Axis]:
    """The axes of an attention or an MLP; none if the module is neither, or is not as expected."""
    children = dict(module.named_children())
    for names, find in (
        (("c_attn", "c_proj"), _packed_heads),
        (("q_proj", "k_proj", "v_proj", "o_proj"), _grouped_heads),
        (("c_fc", "c_proj"), _hidden_units),
        (("gate_proj", "up_proj", "down_proj"), _gated_units),
    ):
        if children.keys() >= set(names):
            axis = find(module, *(children[name] for name in names))
            return [axis] if axis is not None else []
    return []


def known_branches(module: nn.Module) -> list[str]:
    """The tensors that end the branches of a block x + attention(norm(x)) + mlp(norm(…)); none of another module."""
    ends = BRANCHES.get(frozenset(name for name, _ in module.named_children()), ())
    try:
        layers = [(end, module.get_submodule(end)) for end in ends]
    except AttributeError:
        return []
    known = [known_axes(module.get_submodule(end.rpartition(".")[0])) for end in ends]
    return [f"{end}.{name}" for end, layer in layers for name, _ in layer.named_parameters()] if all(known) else []


def _packed_heads(attention: nn.Module, c_attn: nn.Module, c_proj: nn.Module) -> Axis | None:
    """The heads of GPT-2's attention: one layer makes all queries, then all keys, then all values."""
    heads, width, size = _numbers(attention, "num_heads", "split_size", "head_dim")
    if not is_transposed_linear(c_attn) or not is_transposed_linear(c_proj) or not _has_only(attention, c_attn, c_proj):
        return None
    if width != heads * size or (c_attn.nf, c_proj.nx) != (3 * width, width):
        return None  # attention to another sequence, for one
    counts = {"num_heads": 1, "split_size": size, "embed_dim": size, "c_attn.nf": 3 * size, "c_proj.nx": size}
    return Axis(heads, {"c_attn.weight": (1, 3), "c_attn.bias": (0, 3)}, {"c_proj.weight": 0}, counts)


def _grouped_heads(attention: nn.Module, *layers: nn.Module) -> Axis | None:
    """The keys of Llama's attention, each with its value and the queries of it; not if other layers use them."""
    if getattr(getattr(attention, "config", None), "num_kv_shared_layers", 0):
        return None
    size, group = _numbers(attention, "head_dim", "num_key_value_groups")
    norms = [child for name, child in attention.named_children() if name in HEAD_NORMS]
    over_one_head = all(tuple(p.shape) == (size,) for norm in norms for p in norm.parameters())
    if (
        not size
        or not group
        or not over_one_head
        or not _are_linear(layers)
        or not _has_only(attention, *layers, *norms)
    ):
        return None
    query, key, value, out = layers
    heads, rest = divmod(key.out_features, size)
    widths = (key.out_features, value.out_features, query.out_features, out.in_features)
    if rest or widths != (heads * size, heads * size, heads * group * size, heads * group * size):
        return None
    counts = {"q_proj.out_features": group * size, "k_proj.out_features": size, "v_proj.out_features": size}
    counts |= {"o_proj.in_features": group * size}
    held = {"num_heads": group, "num_attention_heads": group, "num_key_value_heads": 1}
    counts |= {name: number for name, number in held.items() if isinstance(getattr(attention, name, None), int)}
    return Axis(heads, _rows(q_proj=query, k_proj=key, v_proj=value), {"o_proj.weight": 1}, counts)


def _hidden_units(mlp: nn.Module, c_fc: nn.Module, c_proj: nn.Module) -> Axis | None:
    """The hidden units of GPT-2's MLP."""
    if not is_transposed_linear(c_fc) or not is_transposed_linear(c_proj) or not _has_only(mlp, c_fc, c_proj):
        return None
    if c_fc.nf != c_proj.nx:
        return None
    counts = {"c_fc.nf": 1, "c_proj.nx": 1}
    return Axis(c_fc.nf, {"c_fc.weight": 1, "c_fc.bias": 0}, {"c_proj.weight": 0}, counts)


def _gated_units(mlp: nn.Module, *layers: nn.Module) -> Axis | None:
    """The hidden units of Llama's MLP, down(act(gate(x))·up(x)); not if it keeps the largest of them alone."""
    if not hasattr(mlp, "act_fn") or not _are_linear(layers) or not _has_only(mlp, *layers):
        return None
    if getattr(mlp, "activation_sparsity", 0):
        return None
    gate, up, down = layers
    if not gate.out_features == up.out_features == down.in_features:
        return None
    counts = dict.fromkeys(("gate_proj.out_features", "up_proj.out_features", "down_proj.in_features"), 1)
    counts |= {"intermediate_size": 1} if isinstance(getattr(mlp, "intermediate_size", None), int) else {}
    return Axis(down.in_features, _rows(gate_proj=gate, up_proj=up), {"down_proj.weight": 1}, counts)


def _numbers(module: nn.Module, *names: str) -> list[int]:
    """Attributes of a module, 0 for those that are not there or are no whole numbers."""
    found = [getattr(module, name, None) for name in names]
    return [value if isinstance(value, int) else 0 for value in found]


def _are_linear(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[nn.Linear]]:
    return all(type(layer) is nn.Linear and "weight" in layer._parameters for layer in layers)


def _has_only(module: nn.Module, *layers: nn.Module) -> bool:
    """Whether a module has no tensors but those of these layers: others might have parts for the units, too."""
    known = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    return all(id(t) in known for t in (*module.parameters(), *module.buffers()))


def _rows(**layers: nn.Linear) -> dict[str, UnitDim]:
    """The tensors of linear layers whose outputs are the units."""
    return {f"{layer}.{name}": 0 for layer, linear in layers.items() for name, _ in linear.named_parameters()}
