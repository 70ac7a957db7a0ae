"""Layers that heads are made of: a classifier, adapters between shapes, and copies of the model's segments."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.surgery.heads.base import Boundary, shape_error

MAX_FEATURES = 2048  # inputs of a classifier of images, if pooling can make them so few


def classifier_layers(boundary: Boundary) -> list[nn.Module]:
    """Pooling or a norm, and one linear layer to the model's output."""
    z, out = boundary.z, boundary.output
    if out.ndim == 3 and z.ndim == 3 and z.shape[1] == out.shape[1]:
        return [nn.LayerNorm(z.shape[2]), nn.Linear(z.shape[2], out.shape[2])]
    if out.ndim != 2 or z.ndim not in (2, 3, 4):
        raise shape_error(boundary, "linear", "is for vectors, sequences or images, and one output vector per sample")
    layers, num_features = _flatten_layers(z)
    return [*layers, nn.Linear(num_features, out.shape[1])]


def copied_layers(boundary: Boundary, chosen: Sequence[int]) -> list[nn.Module]:
    """Trainable copies of some segments behind a boundary, with adapters between shapes that differ."""
    layers: list[nn.Module] = []
    x = boundary.z
    for i in chosen:
        adapter = nn.Sequential(*adapter_layers(x, boundary.segment_inputs[i]))
        segment = copy.deepcopy(boundary.segments[i]).requires_grad_()
        layers += [*adapter, segment]
        x = example_output(nn.Sequential(adapter, segment), x)
    return layers


def adapter_layers(have: Tensor, want: Tensor) -> list[nn.Module]:
    """Layers from one shape of features to another; none where the shapes are equal."""
    if have.shape == want.shape:
        return []
    if have.ndim == want.ndim == 4:
        width = want.shape[1]
        layers: list[nn.Module] = []
        if have.shape[2:] != want.shape[2:]:
            layers.append(nn.AdaptiveAvgPool2d(tuple(want.shape[2:])))
        if have.shape[1] != width:
            layers += [nn.Conv2d(have.shape[1], width, 1, bias=False), nn.GroupNorm(1, width)]
        return layers
    if have.ndim == want.ndim == 3 and have.shape[1] == want.shape[1]:
        return [nn.Linear(have.shape[2], want.shape[2])]
    if want.ndim == 2 and have.ndim in (2, 3, 4):
        layers, num_features = _flatten_layers(have)
        return [*layers, nn.Linear(num_features, want.shape[1], bias=False), nn.LayerNorm(want.shape[1])]
    raise UsageError(
        f"no head can be made from the model's own layers: {tuple(have.shape[1:])} would have to become "
        f"{tuple(want.shape[1:])}; try head=linear, or your own: head=own('package.module:function')"
    )


def _flatten_layers(z: Tensor) -> tuple[list[nn.Module], int]:
    """Layers that make one vector of each sample, and its length."""
    if z.ndim == 4:
        side = next(s for s in (4, 2, 1) if z.shape[1] * s * s <= MAX_FEATURES or s == 1)
        side = min(side, *z.shape[2:])
        return [nn.AdaptiveAvgPool2d(side), nn.Flatten()], z.shape[1] * side**2
    if z.ndim == 3:
        return [nn.LayerNorm(z.shape[2]), MeanOverPositions()], z.shape[2]
    return [], z.shape[1]


class MeanOverPositions(nn.Module):
    """(batch, positions, features) → (batch, features)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@torch.no_grad()
def example_output(module: nn.Module, x: Tensor) -> Tensor:
    """The output of a copy of a module in eval mode; the module and its buffers stay as they are."""
    out: Tensor = copy.deepcopy(module).to(x.device).eval()(x)
    return out
