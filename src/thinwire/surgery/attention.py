"""torch's attention with its packed projections as layers, so that they can be factored like any other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.surgery.lowrank import Factored, Layer, is_shared_or_hooked, uses


class UnpackedAttention(nn.Module):
    """What an nn.MultiheadAttention computes, with its two projections as ordinary linear layers.

    `in_proj` makes queries, keys and values at once where they come from the same input. Not for attention with
    inputs of different sizes, or with keys and values of its own.
    """

    in_proj_bias = None  # torch's encoder layer then leaves out its fast path, which reads packed weights
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
        """As nn.MultiheadAttention's; `is_causal` is a hint there that goes with a mask, and not needed here."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs attn_mask too, as for nn.MultiheadAttention")
        batched = query.dim() == 3
        q, k, v = (self._heads(x, batched) for x in self._projected(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
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

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """(batch, heads, length, size of a head)."""
        x = x if batched else x.unsqueeze(0)
        x = x if self.batch_first or not batched else x.transpose(0, 1)
        split: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return split.transpose(1, 2)

    @staticmethod
    def _mask(attn: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """One mask to be added to scores (batch, heads, queries, keys)."""

        def added(mask: Tensor) -> Tensor:
            return (
                torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
                if mask.dtype == torch.bool
                else mask
            )

        total = None
        if attn is not None:
            total = added(attn) if attn.dim() == 2 else added(attn).unflatten(0, q.shape[:2])
        if padding is not None:
            keys = added(padding if padding.dim() == 2 else padding.unsqueeze(0))[:, None, None, :]
            total = keys if total is None else total + keys
        return total


def unpack_attention(model: nn.Module) -> None:
    """Replace torch's packed attention modules by ones whose projections are layers; parameters stay the same ones."""
    seen = uses(model)
    for name, module in list(model.named_modules()):
        if name and _can_be_opened(module) and not is_shared_or_hooked(module, seen):
            assert isinstance(module, nn.MultiheadAttention)
            model.set_submodule(name, UnpackedAttention(module))


def _can_be_opened(module: nn.Module) -> bool:
    if type(module) is not nn.MultiheadAttention or "weight" not in module.out_proj._parameters:
        return False
    return module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn


def pack_attention(opened: UnpackedAttention) -> nn.MultiheadAttention:
    """torch's attention again; its projections are yet to be filled in."""
    outputs, biased = opened.out_proj, opened.out_proj.bias is not None
    width = len(outputs.weight)
    made = nn.utils.skip_init(
        nn.MultiheadAttention, width, opened.num_heads, opened.dropout, biased, batch_first=opened.batch_first,
        device=outputs.weight.device, dtype=outputs.weight.dtype,
    )  # fmt: skip
    made.in_proj_bias, made.out_proj.bias = opened.in_proj.bias, outputs.bias
    return made.train(opened.training)  # type: ignore[no-any-return]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer
