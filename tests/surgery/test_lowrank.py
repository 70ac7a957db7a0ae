"""Layers as products of two thin ones: exact before truncation, smaller after it, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire.surgery.lowrank import (
    Factored,
    decompose,
    factor,
    factorable_layers,
    merge,
    saves_parameters,
    set_factors,
)
from thinwire.surgery.rank_rule import RankRule

LAYERS = {
    "tall": nn.Linear(6, 20),
    "wide": nn.Linear(20, 6, bias=False),
    "square": nn.Linear(9, 9),
    "conv1d": nn.Conv1d(4, 10, 3, stride=2, padding=1),
    "conv2d": nn.Conv2d(4, 10, 3, stride=2, padding=1, bias=False),
    "conv 1x1": nn.Conv2d(8, 12, 1),
    "conv tall": nn.Conv2d(2, 30, (1, 3), padding="same", padding_mode="reflect"),
    "conv dilated": nn.Conv2d(4, 6, 3, dilation=2, padding=2, padding_mode="circular"),
    "conv3d": nn.Conv3d(2, 9, (1, 2, 3), stride=(1, 2, 1)),
    "float64": nn.Linear(7, 12).double(),
}
INPUTS = {
    nn.Linear: lambda layer: torch.randn(5, 3, layer.in_features),
    nn.Conv1d: lambda layer: torch.randn(3, layer.in_channels, 9),
    nn.Conv2d: lambda layer: torch.randn(3, layer.in_channels, 9, 8),
    nn.Conv3d: lambda layer: torch.randn(2, layer.in_channels, 5, 6, 7),
}


def split(layer: nn.Module, rank: int | None = None) -> Factored:
    found = decompose(layer.weight)
    rank = rank or len(found.sigma)
    return set_factors(factor(layer, rank), found)


def inputs(layer: nn.Module) -> Tensor:
    return INPUTS[type(layer)](layer).to(layer.weight.dtype)


@pytest.mark.parametrize("kind", LAYERS)
def test_two_thin_layers_compute_what_the_layer_did(kind: str) -> None:
    layer = copy.deepcopy(LAYERS[kind])
    thin, x = split(layer), inputs(layer)
    torch.testing.assert_close(thin(x), layer(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(thin.weight, layer.weight, rtol=1e-5, atol=1e-6)
    assert thin.bias is layer.bias
    whole = merge(thin)
    assert type(whole) is type(layer)
    assert str(whole) == str(layer)
    torch.testing.assert_close(whole(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_is_the_factor_of_the_longer_side(kind: str) -> None:
    layer = LAYERS[kind]
    thin = split(layer, rank=2)
    m, n = len(layer.weight), layer.weight[0].numel()
    assert (thin.A.numel(), thin.B.numel()) == (2 * max(m, n), 2 * min(m, n))
    assert thin.layer_rank == 2
    product = thin.A.flatten(1) @ thin.B.flatten(1) if m >= n else thin.B.flatten(1) @ thin.A.flatten(1)
    torch.testing.assert_close(product, thin.weight.flatten(1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.integers(0, 2**20))
def test_a_times_b_is_w_for_any_matrix(m: int, n: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank = min(m, n, rank)  # 0 = all zeros; below min(m, n) = singular
    w = torch.randn(m, rank, generator=generator) @ torch.randn(rank, n, generator=generator)
    up, sigma, down = decompose(w)
    torch.testing.assert_close((up @ down).float(), w, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(w.double()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(up.T @ up, sigma.diag(), rtol=1e-5, atol=1e-5)  # UΣ^½: both share the scale equally
    torch.testing.assert_close(down @ down.T, sigma.diag(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sigma", "cutoff", "rank"),
    [
        ([10.0, 5.0, 1.6, 1.5, 0.1], 0.15, 3),  # 1.5 is not above 0.15·10
        ([10.0, 5.0, 1.6, 1.5, 0.1], 0.149, 4),
        ([10.0, 5.0, 1.6, 1.5, 0.1], 0.005, 5),
        ([10.0, 9.0, 8.0], 0.95, 1),
        ([0.0, 0.0], 0.15, 1),
        ([7.0], 0.5, 1),
    ],
)
def test_the_rank_rule_on_a_known_spectrum(sigma: list[float], cutoff: float, rank: int) -> None:
    assert RankRule(cutoff).layer_rank(torch.tensor(sigma)) == rank
    u, v = (torch.linalg.qr(torch.randn(8, len(sigma), dtype=torch.float64))[0] for _ in range(2))
    found = decompose((u * torch.tensor(sigma)) @ v.T).sigma[: len(sigma)]
    if cutoff != 0.15 or len(sigma) < 5:  # on the edge itself the last bit decides
        assert RankRule(cutoff).layer_rank(found) == rank


spectra = st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=30).map(lambda s: sorted(s, reverse=True))
shares = st.floats(0.001, 0.999)


@given(spectra, shares, shares, st.integers(1, 40))
def test_a_higher_cutoff_keeps_no_more_and_no_layer_falls_below_the_smallest_rank(
    spectrum: list[float], one: float, other: float, least: int
) -> None:
    sigma = torch.tensor(spectrum)
    low, high = sorted((one, other))
    free = RankRule(high).layer_rank(sigma)
    assert 1 <= free <= RankRule(low).layer_rank(sigma) <= len(sigma)
    assert RankRule(high, least).layer_rank(sigma) == max(free, min(least, len(sigma)))
    assert RankRule(high, least).layer_rank(sigma[:0]) == 0, "no singular values: the layer has failed"


def test_truncation_is_the_best_approximation_of_its_rank() -> None:
    layer = nn.Linear(12, 20)
    u, s, v = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    torch.testing.assert_close(split(layer, rank=5).weight, (u[:, :5] * s[:5]) @ v[:5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "largest"), [((20, 20), 9), ((30, 20), 11), ((10, 4, 3, 3), 7), ((4, 1), 0)])
def test_a_layer_saves_parameters_only_below_mn_over_m_plus_n(shape: tuple[int, ...], largest: int) -> None:
    weight = torch.zeros(shape)
    assert [rank for rank in range(1, 21) if saves_parameters(weight, rank)] == list(range(1, largest + 1))
    if len(shape) == 2 and largest:
        layer = nn.Linear(shape[1], shape[0], bias=False)
        size = [sum(p.numel() for p in factor(layer, rank).parameters()) for rank in (largest, largest + 1)]
        assert size[0] < weight.numel() <= size[1]


def test_weights_that_are_not_finite_are_refused() -> None:
    for value in (torch.nan, torch.inf):
        weight = torch.ones(3, 4)
        weight[1, 2] = value
        with pytest.raises(ValueError, match="not finite"):
            decompose(weight)


class Odd(nn.Module):
    """Layers that stay full, each for a reason of its own, around one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 12)
        self.table = nn.Parameter(torch.zeros(12, 12))
        self.usual = nn.Linear(12, 12)
        self.grouped = nn.Conv1d(12, 12, 3, groups=3)
        self.back = nn.ConvTranspose1d(12, 12, 3)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.tied = nn.Linear(12, 12)
        self.twice = nn.Sequential(nn.Linear(12, 12))
        self.again = self.twice
        self.hooked = nn.Linear(12, 12)
        self.hooked.register_forward_hook(lambda *_: None)
        self.thin = nn.Linear(1, 12)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
        self.computed = nn.utils.spectral_norm(nn.Linear(12, 12))
        self.watched = nn.Linear(12, 12)
        self.watched.weight.register_hook(lambda g: g)
        self.marked = nn.Linear(12, 12)
        self.marked.register_buffer("scale", torch.ones(1))
        self.special = Special(12, 12)
        self.out = nn.Linear(12, 12)
        self.tied.weight = self.words.weight


class Special(nn.Linear):
    """A linear layer with a forward of its own."""


def test_only_layers_that_can_be_replaced_are_candidates() -> None:
    assert factorable_layers(Odd()) == ["usual"]
    assert factorable_layers(nn.Linear(9, 9)) == []
    assert factorable_layers(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())) == []
    both = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 3)), nn.Flatten(), nn.Linear(8, 8))
    assert factorable_layers(both) == ["1.0"]


def test_tables_and_norms_are_neither_first_nor_last() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm([2, 8]))
    model.register_parameter("token", nn.Parameter(torch.zeros(1, 1, 8)))
    assert factorable_layers(model) == ["1"]


def test_a_factored_layer_answers_for_the_full_one() -> None:
    thin = split(nn.Linear(6, 20), rank=2)
    assert (thin.in_features, thin.out_features) == (6, 20)
    convolution = nn.Conv2d(4, 10, 3, stride=2, padding=1).to(memory_format=torch.channels_last)
    thin = split(convolution, rank=2)
    assert (thin.in_channels, thin.out_channels, thin.kernel_size, thin.stride) == (4, 10, (3, 3), (2, 2))
    for layer in (thin.down, merge(thin)):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)


def test_replacing_uses_no_random_numbers_and_keeps_the_mode() -> None:
    layer = nn.Conv2d(4, 10, 3).eval()
    before = torch.get_rng_state()
    thin = split(layer, rank=2)
    whole = merge(thin)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for part in (thin, whole) for module in part.modules())


def test_half_precision_weights_are_factored_in_full_precision() -> None:
    layer = nn.Linear(32, 48).to(torch.bfloat16)
    thin = split(layer)
    assert thin.up.weight.dtype == torch.bfloat16
    torch.testing.assert_close(thin.weight, layer.weight, rtol=0.05, atol=0.01)
