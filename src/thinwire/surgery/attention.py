"""nn.MultiheadAttention with its packed projections as linear layers, so that they can be factored or sliced."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.surgery.lowrank import Factored, Layer, count_parameter_uses, is_shared_or_hooked


class UnpackedAttention(nn.Module):
    """Computes the same as an nn.MultiheadAttention, with its two projections as ordinary linear layers.

    `in_proj` computes queries, keys and values at once where they come from the same input. Not for attention with
    inputs of different sizes, or with `add_bias_kv` or `add_zero_attn`.
    """

    in_proj_bias = None  # tells nn.TransformerEncoderLayer not to use its fast path, which reads packed weights
    in_proj: nn.Linear | Factored
    out_proj: nn.Linear | Factored

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.batch_first = packed.num_heads, packed.dropout, packed.batch_first
        self.embed_dim, self.head_dim = packed.embed_dim, packed.head_dim
        self.in_proj = _linear(packed.in_proj_weight, packed.in_proj_bias)
        self.out_proj = _linear(packed.out_proj.weight, packed.out_proj.bias)
        self.train(packed.training)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As nn.MultiheadAttention. There, `is_causal` is a hint that comes with a mask; it is not needed here."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs attn_mask too, as for nn.MultiheadAttention")
        is_batched = query.dim() == 3
        q, k, v = (self._split_heads(x, is_batched) for x in self._project(query, key, value))
        mask = self._additive_mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if query is key is value:
            packed: Tensor = self.in_proj(query)
            return packed.chunk(3, -1)
        down: nn.Module = nn.Identity()
        up: Layer | Factored = self.in_proj
        if isinstance(up, Factored):
            down, up = up.down, up.up
        biases = (None,) * 3 if up.bias is None else up.bias.chunk(3)
        parts = zip((query, key, value), up.weight.chunk(3), biases, strict=True)
        return tuple(F.linear(down(x), weight, bias) for x, weight, bias in parts)

    def _split_heads(self, x: Tensor, is_batched: bool) -> Tensor:
        """(batch, heads, length, head_dim)."""
        x = x if is_batched else x.unsqueeze(0)
        x = x if self.batch_first or not is_batched else x.transpose(0, 1)
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)

    @staticmethod
    def _additive_mask(attn: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores (batch, heads, queries, keys)."""

        def as_float(mask: Tensor) -> Tensor:
            if mask.dtype != torch.bool:
                return mask
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)

        total = None
        if attn is not None:
            total = as_float(attn) if attn.dim() == 2 else as_float(attn).unflatten(0, q.shape[:2])
        if padding is not None:
            keys = as_float(padding if padding.dim() == 2 else padding.unsqueeze(0))[:, None, None, :]
            total = keys if total is None else total + keys
        return total


def unpack_attention(model: nn.Module) -> None:
    """Replace each nn.MultiheadAttention by an UnpackedAttention with the same parameters, where that is possible."""
    num_uses = count_parameter_uses(model)
    for name, module in list(model.named_modules()):
        if name and _can_be_unpacked(module) and not is_shared_or_hooked(module, num_uses):
            assert isinstance(module, nn.MultiheadAttention)
            model.set_submodule(name, UnpackedAttention(module))


def _can_be_unpacked(module: nn.Module) -> bool:
    if type(module) is not nn.MultiheadAttention or "weight" not in module.out_proj._parameters:
        return False
    return module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn


def pack_attention(unpacked: UnpackedAttention) -> nn.MultiheadAttention:
    """An nn.MultiheadAttention of the same sizes and biases; the caller sets the weights of its projections."""
    out_proj = unpacked.out_proj
    packed = nn.utils.skip_init(
        nn.MultiheadAttention, len(out_proj.weight), unpacked.num_heads, unpacked.dropout, out_proj.bias is not None,
        batch_first=unpacked.batch_first, device=out_proj.weight.device, dtype=out_proj.weight.dtype,
    )  # fmt: skip
    packed.in_proj_bias, packed.out_proj.bias = unpacked.in_proj.bias, out_proj.bias
    return packed.train(unpacked.training)  # type: ignore[no-any-return]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer
