"""Low-rank layers: a weight as the product of two thin ones, each a layer of its own, and back again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from thinwire.surgery.huggingface import TransposedLinear, is_transposed_linear, resize_transposed

TorchLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = TorchLayer | TransposedLinear  # that can be factored

SIZE_ATTRIBUTES = (
    "in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation",
    "groups", "padding_mode",
)  # fmt: skip  # that a model may read from a layer
FIRST_OR_LAST = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)


class Factored(nn.Sequential):
    """A linear layer or convolution with the weight W = up·down: thin `down` to the layer rank r, then `up` from it.

    `A` is the factor along the longer side of W, and `B` the other. `up` is a layer of the factored one's type. Of a
    transposed linear layer, W and `up` are transposed, and `down` is an nn.Linear, because it has no bias.
    """

    down: TorchLayer
    up: Layer

    def __init__(self, down: TorchLayer, up: Layer) -> None:
        super().__init__(OrderedDict(down=down, up=up))
        self.was_read = False  # whether the model has read `weight` instead of calling the layer
        if is_transposed_linear(up):
            self.nx, self.nf = down.weight.shape[1], up.nf
            return
        for name in SIZE_ATTRIBUTES:
            if hasattr(down, name):
                setattr(self, name, getattr(up if name.startswith("out_") else down, name))

    @property
    def layer_rank(self) -> int:
        return len(self.down.weight)

    @property
    def A(self) -> Tensor:
        return self.up.weight if self._is_tall else self.down.weight

    @property
    def B(self) -> Tensor:
        return self.down.weight if self._is_tall else self.up.weight

    @property
    def _is_tall(self) -> bool:
        return len(weight_matrix(self.up)) >= self.down.weight[0].numel()

    @property
    def weight(self) -> Tensor:
        """W, for models that read a layer's weight instead of calling the layer."""
        self.was_read = True
        return self.product()

    def product(self) -> Tensor:
        """W = up·down."""
        up, down = weight_matrix(self.up), self.down.weight
        full = (up @ down.flatten(1)).view(len(up), *down.shape[1:])
        return full.T if is_transposed_linear(self.up) else full

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias


def weight_matrix(layer: Layer, like_weight: Tensor | None = None) -> Tensor:
    """The weight of a layer, or a tensor of its shape, as the matrix (outputs × everything else)."""
    weight = layer.weight if like_weight is None else like_weight
    return weight.T if is_transposed_linear(layer) else weight.flatten(1)


class Decomposition(NamedTuple):
    """W = up·down, with the columns of `up` and the rows of `down` sorted by falling singular value."""

    up: Tensor  # UΣ^½
    sigma: Tensor
    down: Tensor  # Σ^½Vᵀ


@torch.no_grad()
def decompose(weight: Tensor) -> Decomposition:
    """W = (UΣ^½)·(Σ^½Vᵀ), of a weight as the matrix (outputs × everything else).

    V are the eigenvectors of WᵀW (or U those of WWᵀ, if it is smaller) and UΣ = W·V, in float64: faster than an SVD in
    float32, and U·Σ·Vᵀ = W·V·Vᵀ is W to the last bit of float32 whatever its singular values. Those below 1e-8 of the
    largest are noise.

    >>> up, sigma, down = decompose(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]))
    >>> sigma
    tensor([4., 3.], dtype=torch.float64)
    >>> (up @ down).round()
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
    return Decomposition(long, sigma, short) if tall is matrix else Decomposition(short.T, sigma, long.T)


def saves_parameters(weight: Tensor, layer_rank: int) -> bool:
    """Whether two factors of this layer rank r have fewer elements than the m × n weight: r < mn/(m + n)."""
    m, n = len(weight), weight[0].numel()
    return layer_rank * (m + n) < m * n


def factorable_layers(model: nn.Module) -> list[str]:
    """Names of linear layers and convolutions that can be factored: not grouped, frozen, shared or hooked.

    The first and the last layer of a model, embeddings included, stay full.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 1))
    >>> factorable_layers(net)
    ['1', '2']
    """
    num_uses = count_parameter_uses(model)
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, FIRST_OR_LAST) or is_transposed_linear(m)]
    return [name for name, layer in layers[1:-1] if _can_be_factored(layer, num_uses)]


def _can_be_factored(layer: nn.Module, num_uses: Counter[int]) -> bool:
    is_layer = type(layer) in get_args(TorchLayer) or is_transposed_linear(layer)
    if not is_layer or getattr(layer, "groups", 1) != 1 or is_shared_or_hooked(layer, num_uses):
        return False
    weight = layer._parameters.get("weight")  # missing if it is computed, as by pruning
    return weight is not None and weight.requires_grad and weight.is_floating_point() and saves_parameters(weight, 1)


def count_parameter_uses(model: nn.Module) -> Counter[int]:
    """How often each parameter occurs in a model, by id."""
    return Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))


def is_shared_or_hooked(module: nn.Module, num_uses: Counter[int]) -> bool:
    """Whether a module cannot be replaced, because others share its parameters or because it has hooks or buffers."""
    hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    hooks += [p._backward_hooks or {} for p in module.parameters()]
    return any(hooks) or any(True for _ in module.buffers()) or any(num_uses[id(p)] > 1 for p in module.parameters())


def factor(layer: Layer, layer_rank: int) -> Factored:
    """Two thin layers in place of a layer, with its bias; set_factors gives them their weights."""
    if is_transposed_linear(layer):
        thin = Factored(_linear(layer.nx, layer_rank, layer.weight), resize_transposed(layer, layer_rank))
        return thin.train(layer.training)
    assert not isinstance(layer, TransposedLinear)
    outputs = len(layer.weight)
    down = _resize(layer, layer_rank, bias=False)
    like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    up = (
        _linear(layer_rank, outputs, layer.weight, bias=layer.bias is not None)
        if isinstance(layer, nn.Linear)
        else nn.utils.skip_init(type(layer), layer_rank, outputs, 1, bias=layer.bias is not None, **like)
    )
    up.bias = layer.bias
    return Factored(down, up).train(layer.training)


def factor_layers(model: nn.Module, layer_ranks: Mapping[str, int]) -> None:
    """Replace some layers of a model by two thin ones of this layer rank, whose weights are yet to be filled in."""
    for name, layer_rank in layer_ranks.items():
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, factor(layer, layer_rank))


@torch.no_grad()
def set_factors(layer: Factored, decomposition: Decomposition) -> Factored:
    """Copy as much of a decomposition as the layer rank allows into the weights of `up` and `down`."""
    r = layer.layer_rank
    up = decomposition.up[:, :r]
    layer.up.weight.copy_(up.T if is_transposed_linear(layer.up) else up.reshape(layer.up.weight.shape))
    layer.down.weight.copy_(decomposition.down[:r].reshape(layer.down.weight.shape))
    return layer


@torch.no_grad()
def merge(layer: Factored) -> Layer:
    """One full layer with the weight up·down.

    >>> layer = nn.Linear(6, 4)
    >>> thin = set_factors(factor(layer, layer_rank=4), decompose(layer.weight))
    >>> torch.allclose(merge(thin).weight, layer.weight, atol=1e-6)
    True
    """
    full: Layer
    if is_transposed_linear(layer.up):
        full = resize_transposed(layer.up, layer.down.weight.shape[1])
    else:
        full = _resize(layer.down, len(layer.up.weight), bias=layer.bias is not None)
    full.weight.copy_(layer.product())
    full.bias = layer.bias
    return full.train(layer.training)


def _linear(inputs: int, outputs: int, like: Tensor, bias: bool = False) -> nn.Linear:
    """A linear layer whose weights are not initialized."""
    made: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=like.device, dtype=like.dtype)
    return made


def _resize(layer: TorchLayer, outputs: int, bias: bool) -> TorchLayer:
    """A layer like another one, but with this number of outputs; its weights are not initialized."""
    like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    made: TorchLayer
    if isinstance(layer, nn.Linear):
        made = _linear(layer.in_features, outputs, layer.weight, bias)
    else:
        options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        sizes = (layer.in_channels, outputs, layer.kernel_size)
        made = nn.utils.skip_init(type(layer), *sizes, bias=bias, **options, **like)
        if layer.weight.dim() == 4 and not layer.weight.is_contiguous():
            made.weight.data = made.weight.data.contiguous(memory_format=torch.channels_last)
    return made
