"""A narrow network is the whole one without the units of other ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.surgery.sliceable_models import NETS, made
from thinwire import registry
from thinwire.common.tensors import named_tensors
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.axes.residual import ResidualBlocks, residual_blocks_of
from thinwire.surgery.meta import to_meta, with_tensors
from thinwire.surgery.narrow import eval_scales, narrow_network
from thinwire.surgery.slices import Slices, UnitIndices, take_slice
from thinwire.surgery.unit_assignment import assign_units


def parts_of(net: nn.Module, slices: Slices, unit_indices: UnitIndices) -> dict[str, Tensor]:
    """A rank's slices of the tensors of a network."""
    index = {key: slices.slice_index(key, unit_indices) for key in slices.tensors}
    return {key: take_slice(t.detach(), i) for key, t in named_tensors(net).items() if (i := index[key]) is not None}


def masked(net: nn.Module, slices: Slices, unit_indices: UnitIndices, scaled: bool = False) -> nn.Module:
    """A copy of a network in which zeros are all that comes of the units, or blocks, of other ranks."""
    tensors = {key: t.detach().clone() for key, t in named_tensors(net).items()}
    for axis, units in zip(slices.axes, unit_indices, strict=True):
        if isinstance(axis, ResidualBlocks):
            for i, ends in enumerate(axis.branches.values()):
                for key in ends if i not in units else ():
                    tensors[key].zero_()
            continue
        for key, along in axis.used_by.items():
            dim, repeats = (along, 1) if isinstance(along, int) else along
            mask = torch.zeros(axis.size).index_fill(
                0, units, axis.size / len(units) if scaled and not axis.normed else 1.0
            )
            inner = tensors[key].shape[dim] // (repeats * axis.size)
            mask = mask.repeat(repeats).repeat_interleave(inner)
            tensors[key] *= mask.view(-1, *[1] * (tensors[key].dim() - dim - 1))
    return with_tensors(net, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_a_narrow_network_is_the_whole_one_without_the_units_of_others(name: str, scaled: bool) -> None:
    net = made(name)
    slices = Slices(net, axes_of(net))
    x = torch.randn(NETS[name][1], generator=torch.Generator().manual_seed(1))
    empty = copy.deepcopy(net)
    to_meta(empty)
    for unit_indices in assign_units([axis.size for axis in slices.axes], [1, 1, 1], 0, 0):
        parts = parts_of(net, slices, unit_indices)
        small = narrow_network(empty, slices, unit_indices, parts, scaled)
        torch.testing.assert_close(small(x), masked(net, slices, unit_indices, scaled)(x), rtol=1e-4, atol=1e-5)
        assert slices.num_elements(unit_indices) == sum(t.numel() for t in parts.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "depthwise", "resnet", "blocks"])
def test_training_a_narrow_network_is_training_the_masked_whole_one(name: str) -> None:
    """BatchNorm sees the same batch, so outputs, gradients and running statistics of what a rank has are the same."""
    known = "resnet" if name == "blocks" else name
    net = made(known).train().double()
    slices = Slices(net, residual_blocks_of(net) if name == "blocks" else axes_of(net))
    x = torch.randn(8, *NETS[known][1][1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for unit_indices in assign_units([axis.size for axis in slices.axes], [1, 1, 1], 0, 0):
        small = narrow_network(net, slices, unit_indices, parts_of(net, slices, unit_indices), scaled=False)
        whole = masked(net, slices, unit_indices)
        outputs = [some(x) for some in (small, whole)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.square().sum().backward()
        of_whole = {key: p.grad for key, p in whole.named_parameters()} | dict(whole.named_buffers())
        of_small = {key: p.grad for key, p in small.named_parameters()} | dict(small.named_buffers())
        for key, found in of_small.items():
            expected = take_slice(of_whole[key], slices.slice_index(key, unit_indices) or ())
            torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_with_one_hidden_layer_the_whole_is_the_sum_of_its_parts() -> None:
    net = nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 3))
    slices = Slices(net, axes_of(net))
    x, bias = torch.randn(7, 5), net[2].bias.clone()
    total = torch.zeros(7, 3)
    for unit_indices in assign_units([11], [1, 1, 1, 1], 3, 4):
        parts = parts_of(net, slices, unit_indices)
        total += narrow_network(net, slices, unit_indices, parts, scaled=False)(x) - bias
    torch.testing.assert_close(total, net(x) - bias)


@pytest.mark.parametrize("normed", [nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8, elementwise_affine=False)])
def test_norms_over_units_are_as_wide_as_the_network(normed: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(5, 8), normed, nn.ReLU(), nn.Linear(8, 3))
    slices = Slices(net, axes_of(net))
    for unit_indices in assign_units([8], [1, 1, 1], 0, 0):
        parts = parts_of(net, slices, unit_indices)
        small = narrow_network(net, slices, unit_indices, parts, scaled=False)
        assert small(torch.randn(4, 5)).shape == (4, 3)
        assert small[1].normalized_shape == (len(unit_indices[0]),)


def test_a_group_norm_keeps_its_groups_together() -> None:
    net = nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(6, 12), nn.Conv2d(12, 2, 1))
    slices = Slices(net, axes_of(net))
    assert [axis.size for axis in slices.axes] == [6]
    for unit_indices in assign_units([6], [1, 1], 0, 0):
        parts = parts_of(net, slices, unit_indices)
        small = narrow_network(net, slices, unit_indices, parts, scaled=False)
        assert (small[1].num_groups, small[1].num_channels, small[0].out_channels) == (3, 6, 6)
        x = torch.randn(2, 3, 4, 4)
        whole = net[:2](x)
        channels = (unit_indices[0][:, None] * 2 + torch.arange(2)).reshape(-1)
        torch.testing.assert_close(small[:2](x), whole[:, channels])


@torch.no_grad()
def test_blocks_of_others_are_left_out() -> None:
    net = registry.build("models", "resnet32", (3, 8, 8), 3).eval()
    slices = Slices(net, residual_blocks_of(net))
    assert slices.axes[0].size == 13  # 15 blocks, of which two change the size of the image
    assigned = assign_units([13], [1, 1], 0, 0)
    x = torch.randn(2, 3, 8, 8)
    for unit_indices in assigned:
        parts = parts_of(net, slices, unit_indices)
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
