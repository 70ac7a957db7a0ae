"""Low-rank layers: a weight as the product of two thin ones, each a layer of its own, and back again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d  # that can be factored

OUTER = ("in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation",
         "groups", "padding_mode")  # fmt: skip  # what a model may ask a layer for
FIRST_OR_LAST = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)


class Factored(nn.Sequential):
    """A linear layer or convolution with the weight W = up·down: thin `down` to rank r, then `up` from it.

    Of the two, `A` is the one along the longer side of W, and `B` the other.
    """

    down: Layer
    up: Layer

    def __init__(self, down: Layer, up: Layer) -> None:
        super().__init__(OrderedDict(down=down, up=up))
        self.was_read = False  # instead of called
        for name in OUTER:
            if hasattr(down, name):
                setattr(self, name, getattr(up if name.startswith("out_") else down, name))

    @property
    def rank(self) -> int:
        return len(self.down.weight)

    @property
    def A(self) -> Tensor:
        return self.up.weight if self._tall else self.down.weight

    @property
    def B(self) -> Tensor:
        return self.down.weight if self._tall else self.up.weight

    @property
    def _tall(self) -> bool:
        return len(self.up.weight) >= self.down.weight[0].numel()

    @property
    def weight(self) -> Tensor:
        """W, for models that read a layer's weight instead of calling the layer."""
        self.was_read = True
        return self.product()

    def product(self) -> Tensor:
        """W = up·down."""
        up, down = self.up.weight, self.down.weight
        return (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias


class Split(NamedTuple):
    """W = up·down, with columns and rows by falling singular value."""

    up: Tensor  # UΣ^½
    sigma: Tensor
    down: Tensor  # Σ^½Vᵀ


@torch.no_grad()
def decompose(weight: Tensor) -> Split:
    """W = (UΣ^½)·(Σ^½Vᵀ), of a weight as the matrix (outputs × everything else).

    V are the eigenvectors of WᵀW (or U those of WWᵀ, if it is smaller) and UΣ = W·V, in float64: faster than an SVD in
    float32, and U·Σ·Vᵀ = W·V·Vᵀ is W to the last bit of float32 whatever its singular values. Those below 1e-8 of the
    largest are noise.

    >>> split = decompose(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]))
    >>> split.sigma
    tensor([4., 3.], dtype=torch.float64)
    >>> (split.up @ split.down).round()
    tensor([[3., 0.],
            [0., 4.],
            [0., 0.]], dtype=torch.float64)
    """
    matrix = weight.detach().flatten(1).double()
    tall = matrix if len(matrix) >= matrix.shape[1] else matrix.T
    if not tall.isfinite().all():
        raise ValueError("it has elements that are not finite")
    values, vectors = torch.linalg.eigh(tall.T @ tall)
    sigma, vectors = values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    root = sigma.sqrt()
    long = tall @ vectors * torch.where(root > 0, 1 / root, 0)
    short = (vectors * root).T
    return Split(long, sigma, short) if tall is matrix else Split(short.T, sigma, long.T)


def rank_of(sigma: Tensor, cutoff: float) -> int:
    """How many singular values, in falling order, are above a part of the largest; one at least, if there are any.

    >>> rank_of(torch.tensor([10.0, 5.0, 1.6, 1.5, 0.1]), cutoff=0.15)
    3
    """
    return max(1, int((sigma > cutoff * sigma[0]).sum())) if len(sigma) else 0


def gains(weight: Tensor, rank: int) -> bool:
    """Whether two factors of a rank are smaller than the weight: r < mn/(m + n)."""
    m, n = len(weight), weight[0].numel()
    return rank * (m + n) < m * n


def candidates(model: nn.Module) -> list[str]:
    """Layers that can be factored: linear ones and convolutions that are not grouped, frozen, shared or hooked.

    The first and the last layer of a model, embeddings included, stay full.

    >>> candidates(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)))
    ['1', '2']
    """
    seen = uses(model)
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, FIRST_OR_LAST)]
    return [name for name, layer in layers[1:-1] if _can_be_factored(layer, seen)]


def _can_be_factored(layer: nn.Module, seen: Counter[int]) -> bool:
    if type(layer) not in get_args(Layer) or getattr(layer, "groups", 1) != 1 or is_shared_or_hooked(layer, seen):
        return False
    weight = layer._parameters.get("weight")  # not there if something computes it, as pruning does
    return weight is not None and weight.requires_grad and weight.is_floating_point() and gains(weight, 1)


def uses(model: nn.Module) -> Counter[int]:
    """How often each parameter occurs in a model, by id."""
    return Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))


def is_shared_or_hooked(module: nn.Module, seen: Counter[int]) -> bool:
    """Whether somebody would miss a module that is replaced, or something of the user's would go with it."""
    hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    hooks += [p._backward_hooks or {} for p in module.parameters()]
    return any(hooks) or any(True for _ in module.buffers()) or any(seen[id(p)] > 1 for p in module.parameters())


def factor(layer: Layer, rank: int) -> Factored:
    """Two thin layers in place of a layer, with its bias; their weights are yet to be filled in."""
    outputs = len(layer.weight)
    down = _resized(layer, rank, bias=False)
    where = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    up = (
        nn.utils.skip_init(nn.Linear, rank, outputs, bias=layer.bias is not None, **where)
        if isinstance(layer, nn.Linear)
        else nn.utils.skip_init(type(layer), rank, outputs, 1, bias=layer.bias is not None, **where)
    )
    up.bias = layer.bias
    return Factored(down, up).train(layer.training)


@torch.no_grad()
def fill(layer: Factored, split: Split) -> Factored:
    """Set the factors of a layer, as far as its rank goes."""
    layer.up.weight.copy_(split.up[:, : layer.rank].reshape(layer.up.weight.shape))
    layer.down.weight.copy_(split.down[: layer.rank].reshape(layer.down.weight.shape))
    return layer


@torch.no_grad()
def merge(layer: Factored) -> Layer:
    """The one full layer that two thin ones make.

    >>> layer = nn.Linear(6, 4)
    >>> thin = fill(factor(layer, rank=4), decompose(layer.weight))
    >>> torch.allclose(merge(thin).weight, layer.weight, atol=1e-6)
    True
    """
    full = _resized(layer.down, len(layer.up.weight), bias=layer.bias is not None)
    full.weight.copy_(layer.product())
    full.bias = layer.bias
    return full.train(layer.training)


def _resized(layer: Layer, outputs: int, bias: bool) -> Layer:
    """A layer like another one, but with so many outputs; not yet filled in."""
    where = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    made: Layer
    if isinstance(layer, nn.Linear):
        made = nn.utils.skip_init(nn.Linear, layer.in_features, outputs, bias=bias, **where)
    else:
        place = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        sizes = (layer.in_channels, outputs, layer.kernel_size)
        made = nn.utils.skip_init(type(layer), *sizes, bias=bias, **place, **where)
        if layer.weight.dim() == 4 and not layer.weight.is_contiguous():
            made.weight.data = made.weight.data.contiguous(memory_format=torch.channels_last)
    return made
