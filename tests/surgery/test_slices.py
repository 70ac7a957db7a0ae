"""Axes are found or declared; a narrow network is the whole one without the units of others; paste undoes cut."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire as tw
from tests.surgery import own_models
from tests.surgery.own_models import with_suggestion
from thinwire import registry
from thinwire.common.tensors import named_tensors
from thinwire.surgery.attention import unpack_attention
from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.axes.residual import residual_blocks_of
from thinwire.surgery.meta import initial_tensors, to_meta, with_tensors
from thinwire.surgery.narrow import eval_scales, narrow_network
from thinwire.surgery.slices import Slices, put_slice, take_slice
from thinwire.surgery.unit_assignment import assign_units, split_by_shares


class Gated(nn.Module):
    """A layer whose halves are multiplied: found by nobody, so declared."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 2 * 8), nn.Linear(8, 6)
        self.thinwire_axes = [tw.Axis(8, {"up.weight": (0, 2), "up.bias": (0, 2)}, {"down.weight": 1})]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.glu(self.up(x)))


def model(name: str, *args: object) -> nn.Module:
    built: nn.Module = registry.build("models", name, *args)
    return built


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[int]]] = {  # model, input, sizes of its axes
    "mlp": (lambda: model("mlp(width=12, depth=3, norm=True)", (5,), 3), (4, 5), [12, 12, 12]),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3))
        ),
        (4, 5),
        [8],
    ),
    "prelu": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(8), nn.Linear(8, 7), nn.PReLU(), nn.Linear(7, 3)),
        (4, 5),
        [8, 7],
    ),
    "cnn": (lambda: model("cnn(width=6)", (1, 8, 8), 3), (4, 1, 8, 8), [6, 12, 24]),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 1),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, groups=8, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 1),
        ),
        (2, 2, 5, 5),
        [8],
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 8, 1),
            nn.ReLU(),
            nn.Conv1d(8, 8, 1, groups=2),
            nn.ReLU(),
            nn.Conv1d(8, 6, 1),
            nn.ReLU(),
            nn.Conv1d(6, 2, 1),
        ),
        (2, 2, 5),
        [6],
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2)
        ),
        (2, 2, 5, 5),
        [6, 8],
    ),
    "flat sequence": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(40, 2)),
        (4, 5, 3),
        [8],
    ),
    "resnet": (lambda: model("resnet32", (3, 8, 8), 3), (2, 3, 8, 8), [16] * 5 + [32] * 5 + [64] * 5),
    "bottleneck": (
        lambda: model("resnet50", (3, 4, 4), 3),
        (2, 3, 4, 4),
        [64] * 6 + [128] * 8 + [256] * 12 + [512] * 6,
    ),
    "vit": (lambda: model("vit(width=24, depth=2, heads=4)", (1, 8, 8), 3), (2, 1, 8, 8), [4, 4, 96, 96]),
    "declared": (lambda: nn.Sequential(nn.Linear(5, 6), Gated(), nn.Linear(6, 3)), (4, 5), [8]),
    "torch": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        (2, 5, 12),
        [20, 4, 20, 4],
    ),
    "own heads": (lambda: own_models.with_heads(fused=True), (2, 5, 12), [4]),
    "own grouped heads": (lambda: own_models.with_heads(fused=False), (2, 5, 12), [2]),
    "own gpt, as suggested": (lambda: with_suggestion(own_models.gpt()), (2, 5, 12), [20, 20]),
    "own llama, as suggested": (lambda: with_suggestion(own_models.llama()), (2, 5, 12), [20, 20]),
    "own grouped, as suggested": (lambda: with_suggestion(own_models.grouped()), (2, 5, 12), [20]),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = NETS[name][0]()
    unpack_attention(net)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.bias)
    return net.eval()


@pytest.mark.parametrize("name", NETS)
def test_axes_are_found(name: str) -> None:
    assert sorted(axis.size for axis in axes_of(made(name))) == sorted(NETS[name][2])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_a_narrow_network_is_the_whole_one_without_the_units_of_others(name: str, scaled: bool) -> None:
    net = made(name)
    slices = Slices(net, axes_of(net))
    tensors = {key: t.detach().clone() for key, t in named_tensors(net).items()}
    x = torch.randn(NETS[name][1], generator=torch.Generator().manual_seed(1))
    empty = copy.deepcopy(net)
    to_meta(empty)
    for unit_indices in assign_units([axis.size for axis in slices.axes], [1, 1, 1], 0, 0):
        masked = {key: t.clone() for key, t in tensors.items()}
        for axis, units in zip(slices.axes, unit_indices, strict=True):
            assert isinstance(axis, Axis)
            for key, along in axis.used_by.items():
                dim, repeats = (along, 1) if isinstance(along, int) else along
                mask = torch.zeros(axis.size).index_fill(
                    0, units, axis.size / len(units) if scaled and not axis.normed else 1.0
                )
                inner = tensors[key].shape[dim] // (repeats * axis.size)
                mask = mask.repeat(repeats).repeat_interleave(inner)
                masked[key] *= mask.view(-1, *[1] * (tensors[key].dim() - dim - 1))
        parts = {key: take_slice(t, slices.slice_index(key, unit_indices) or ()) for key, t in tensors.items()}
        small = narrow_network(empty, slices, unit_indices, parts, scaled)
        torch.testing.assert_close(small(x), with_tensors(net, masked)(x), rtol=1e-4, atol=1e-5)
        assert slices.num_elements(unit_indices) == sum(t.numel() for t in parts.values())


@torch.no_grad()
def test_with_one_hidden_layer_the_whole_is_the_sum_of_its_parts() -> None:
    net = nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 3))
    slices = Slices(net, axes_of(net))
    x, bias = torch.randn(7, 5), net[2].bias.clone()
    total = torch.zeros(7, 3)
    for unit_indices in assign_units([11], [1, 1, 1, 1], 3, 4):
        parts = {
            key: take_slice(t, slices.slice_index(key, unit_indices) or ()) for key, t in named_tensors(net).items()
        }
        total += narrow_network(net, slices, unit_indices, parts, scaled=False)(x) - bias
    torch.testing.assert_close(total, net(x) - bias)


@pytest.mark.parametrize("normed", [nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8, elementwise_affine=False)])
def test_norms_over_units_are_as_wide_as_the_network(normed: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(5, 8), normed, nn.ReLU(), nn.Linear(8, 3))
    slices = Slices(net, axes_of(net))
    for unit_indices in assign_units([8], [1, 1, 1], 0, 0):
        parts = {
            key: take_slice(t.detach(), slices.slice_index(key, unit_indices) or ())
            for key, t in named_tensors(net).items()
        }
        small = narrow_network(net, slices, unit_indices, parts, scaled=False)
        assert small(torch.randn(4, 5)).shape == (4, 3)
        assert small[1].normalized_shape == (len(unit_indices[0]),)


def test_a_group_norm_keeps_its_groups_together() -> None:
    net = nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(6, 12), nn.Conv2d(12, 2, 1))
    slices = Slices(net, axes_of(net))
    assert [axis.size for axis in slices.axes] == [6]
    for unit_indices in assign_units([6], [1, 1], 0, 0):
        parts = {
            key: take_slice(t.detach(), slices.slice_index(key, unit_indices) or ())
            for key, t in named_tensors(net).items()
        }
        small = narrow_network(net, slices, unit_indices, parts, scaled=False)
        assert (small[1].num_groups, small[1].num_channels, small[0].out_channels) == (3, 6, 6)
        x = torch.randn(2, 3, 4, 4)
        whole = net[:2](x)
        channels = (unit_indices[0][:, None] * 2 + torch.arange(2)).reshape(-1)
        torch.testing.assert_close(small[:2](x), whole[:, channels])


@torch.no_grad()
def test_blocks_of_others_are_left_out() -> None:
    net = model("resnet32", (3, 8, 8), 3).eval()
    slices = Slices(net, residual_blocks_of(net))
    assert slices.axes[0].size == 13  # 15 blocks, of which two change the size of the image
    assigned = assign_units([13], [1, 1], 0, 0)
    x = torch.randn(2, 3, 8, 8)
    for unit_indices in assigned:
        index = {key: slices.slice_index(key, unit_indices) for key in slices.tensors}
        parts = {key: t.detach() for key, t in named_tensors(net).items() if index[key] is not None}
        small = narrow_network(net, slices, unit_indices, parts, scaled=False)
        without = copy.deepcopy(net)
        for i, block in enumerate(residual_blocks_of(net).branches):
            if i not in unit_indices[0]:
                without.get_submodule(block).body[4].weight.zero_()
        torch.testing.assert_close(small(x), without(x))
        assert sum(isinstance(m, nn.Identity) for m in small) == 13 - len(unit_indices[0])
        twice = narrow_network(net, slices, unit_indices, parts, scaled=True)
        block = next(name for i, name in enumerate(residual_blocks_of(net).branches) if i in unit_indices[0])
        y = torch.randn(2, twice.get_submodule(block).body[0].in_channels, 8, 8)
        branch = small.get_submodule(block).body(y)
        torch.testing.assert_close(twice.get_submodule(block).body(y), branch * (13 / len(unit_indices[0])))
    assert set(eval_scales(slices, assigned).values()) == {0.5}


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
)
def test_pasting_what_was_cut_changes_nothing_and_nothing_else(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape).float()
    index = tuple(
        data.draw(st.none() | st.sets(st.integers(0, n - 1), min_size=1).map(lambda s: torch.tensor(sorted(s))))
        for n in shape
    )
    part = take_slice(tensor, index)
    other = torch.full_like(tensor, -1)
    put_slice(other, index, part)
    kept = other >= 0
    assert torch.equal(other[kept], tensor[kept])
    assert kept.sum() == part.numel()
    put_slice(tensor, index, part)
    assert torch.equal(tensor, torch.arange(math.prod(shape)).view(shape))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    number=st.integers(0, 5),
)
def test_every_unit_is_dealt_to_one_rank(sizes: list[int], shares: list[float], number: int) -> None:
    assigned = assign_units(sizes, shares, 0, number)
    assert assigned[0][0].equal(assign_units(sizes, shares, 0, number)[0][0])
    for axis, size in enumerate(sizes):
        held = [unit_indices[axis] for unit_indices in assigned]
        assert all(len(units) for units in held)
        assert all(units.equal(units.sort().values) for units in held)
        everything = torch.cat(held).sort().values
        if size >= len(shares):
            assert everything.equal(torch.arange(size))
        else:
            assert everything.unique().equal(torch.arange(size))


def test_deals_differ_between_rounds_and_axes() -> None:
    (a, b), (c, _) = assign_units([64, 64], [1, 1], 0, 0)[0], assign_units([64, 64], [1, 1], 0, 1)[0]
    assert not a.equal(b)
    assert not a.equal(c)


@given(st.integers(1, 60), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_portions_are_whole_and_near_their_shares(size: int, shares: list[float]) -> None:
    size = max(size, len(shares))
    parts = split_by_shares(size, shares)
    assert sum(parts) == size
    assert min(parts) >= 1
    if all(size * share / sum(shares) >= 1 for share in shares):
        order = sorted(range(len(shares)), key=lambda i: shares[i])
        assert all(parts[i] <= parts[j] + 1 for i, j in itertools.pairwise(order))


def test_what_cannot_be_found_is_told_with_what_to_add() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    with pytest.raises(
        tw.UsageError, match=r'Own: first .*tw.Axis\(8, {"first.weight": 0, "first.bias": 0}, {"second.weight": 1}\)'
    ):
        axes_of(Own())
    with pytest.raises(tw.UsageError, match=r"no residual blocks are found in Own.*thinwire_branches"):
        residual_blocks_of(Own())


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (Axis(8, {"up.wait": 0}, {}), "no tensor 0.up.wait"),
        (Axis(7, {"up.weight": 0}, {}), "0.up.weight is 16×6, so its dimension 0 is not made up of 7 units"),
        (Axis(8, {"up.weight": (0, 3)}, {}), "not made up of 3 times 8 units"),
        (Axis(8, {"up.bias": 1}, {}), "dimension 1"),
    ],
)
def test_wrong_axes_are_refused(axis: Axis, message: str) -> None:
    gated = Gated()
    gated.thinwire_axes = [axis]
    with pytest.raises(tw.UsageError, match=message):
        axes_of(nn.Sequential(gated))


def test_layers_that_share_weights_are_left_whole() -> None:
    net = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    net[2].weight = net[0].weight
    assert [axis.made_by.keys() for axis in axes_of(net)] == [{"4.weight", "4.bias"}]
    wrapped = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4),
                            nn.ReLU(), nn.Linear(4, 2))  # fmt: skip
    assert [axis.made_by.keys() for axis in axes_of(wrapped)] == [{"2.weight", "2.bias"}]


def test_chains_end_where_units_would_not_be_on_their_own() -> None:
    softmax = nn.Softmax(-1)
    twice = nn.Sequential(
        nn.Linear(6, 12), softmax, nn.Linear(12, 12), softmax, nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    assert [axis.size for axis in axes_of(twice)] == [8]
    with pytest.raises(tw.UsageError, match="no hidden units"):
        axes_of(nn.Sequential(nn.Conv1d(1, 16, 1), nn.ReLU(), nn.Linear(16, 4)))  # of the length, not the channels
    made_from_others = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU(),
                                     nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))  # fmt: skip
    assert [axis.made_by.keys() for axis in axes_of(made_from_others)] == [{"4.weight", "4.bias"}]


@pytest.mark.parametrize(
    ("norm", "bias", "absorbed"),
    [
        (nn.BatchNorm1d(4), True, True),
        (nn.BatchNorm1d(4).eval(), True, False),
        (nn.BatchNorm1d(4, track_running_stats=False), False, True),
        (nn.LayerNorm(4), True, False),
        (nn.LayerNorm(4), False, True),
    ],
)
def test_a_norm_absorbs_a_factor_only_if_it_does(norm: nn.Module, bias: bool, absorbed: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4, bias=bias), norm)
    assert [axis.normed for axis in axes_of(net)] == [absorbed]


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
        odd = nn.Sequential(model("vit(width=24, depth=1, heads=4)", (1, 8, 8), 3))
    with pytest.raises(tw.UsageError, match=r"Positions.*reset_parameters"):
        initial_tensors(odd, torch.device("cpu"))
