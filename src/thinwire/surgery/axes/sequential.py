"""Axes found in nn.Sequentials: units that one layer makes and the next one uses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from thinwire.surgery.axes.axis import Axis, UnitDim, join_names
from thinwire.surgery.lowrank import count_parameter_uses

NamedModules = list[tuple[str, nn.Module]]

CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
TRANSPOSED_CONVOLUTIONS = {nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
CHANNEL_NORMS = {
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
}  # fmt: skip
FEATURE_NORMS = {nn.LayerNorm, nn.RMSNorm}
NORMS = CHANNEL_NORMS | FEATURE_NORMS | {nn.GroupNorm}
ELEMENTWISE = {"activation", "dropout"}  # submodules of torch.nn.modules
PER_CHANNEL = {"pooling", "padding", "upsampling"}
NOT_ELEMENTWISE = {nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention}


def sequential_axes(model: nn.Module) -> Iterator[Axis]:
    """The axes in every nn.Sequential of a model. Layers with shared or parametrized weights end the search."""
    num_uses = count_parameter_uses(model)

    def has_own_weights(module: nn.Module) -> bool:
        return not parametrize.is_parametrized(module) and all(num_uses[id(p)] == 1 for p in module.parameters())

    for modules in _sequentials(model):
        partial: PartialAxis | None = None  # of the last layer, while only per-unit modules followed it
        for i, (name, module) in enumerate(modules):
            if not has_own_weights(module):
                partial = None
            elif partial is not None and partial.extend_through(name, module):
                continue
            elif _is_linear_or_convolution(module):
                normed = i + 1 < len(modules) and _removes_scale(modules[i + 1][1], module)
                axis = partial.complete(name, module, normed) if partial is not None else None
                if axis is not None:
                    yield axis
                partial = PartialAxis(name, module)
            else:
                partial = None


def _sequentials(module: nn.Module, path: str = "") -> Iterator[NamedModules]:
    """The members of each nn.Sequential; an nn.Sequential directly inside another one is a part of it."""
    members = list(_flatten(module, path)) if type(module) is nn.Sequential else [(path, module)]
    if type(module) is nn.Sequential:
        yield members
    for name, member in members:
        for child_name, child in member.named_children():
            yield from _sequentials(child, join_names(name, child_name))


def _flatten(sequential: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, member in sequential._modules.items():  # not named_children: a module that occurs twice counts twice
        if member is None:
            continue
        if type(member) is nn.Sequential:
            yield from _flatten(member, join_names(path, name))
        else:
            yield join_names(path, name), member


class PartialAxis:
    """Units that a layer makes, before the layer that uses them is known."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.has_channels = type(layer) is not nn.Linear
        size_attribute = "out_channels" if self.has_channels else "out_features"
        self.width: int = getattr(layer, size_attribute)
        self.group_size = 1  # features that a group norm keeps together: they are one unit
        self.made_by: dict[str, UnitDim] = {}
        self.counts: dict[str, int] = {}  # features for each of an attribute; −k: one for every k features
        self.is_flattened = False
        out_dim = 1 if type(layer) in TRANSPOSED_CONVOLUTIONS else 0
        self._add(name, layer, {"weight": out_dim, "bias": 0}, size_attribute)

    def extend_through(self, name: str, module: nn.Module) -> bool:
        """Add a module that treats each unit on its own; False if it does not."""
        kind = type(module)
        attributes: dict[str, Any] = module.__dict__
        submodule = kind.__module__.removeprefix("torch.nn.modules.")
        if kind is nn.PReLU:
            if attributes["num_parameters"] == self.width:
                self._add(name, module, {"weight": 0}, "num_parameters")
            return attributes["num_parameters"] in (1, self.width)
        if (submodule in ELEMENTWISE and kind not in NOT_ELEMENTWISE) or kind is nn.Identity:
            return True
        if kind is nn.Flatten:
            self.is_flattened = True
            return bool(attributes["start_dim"] == 1 and attributes["end_dim"] == -1)
        if self.is_flattened:
            return False
        if submodule in PER_CHANNEL and self.has_channels:
            return True
        if kind in CONVOLUTIONS:
            sizes = ("in_channels", "out_channels", "groups")
            is_depthwise = all(attributes[size] == self.width for size in sizes)
            if is_depthwise:
                self._add(name, module, {"weight": 0, "bias": 0}, *sizes)
            return is_depthwise
        return self._extend_through_norm(name, module)

    def _extend_through_norm(self, name: str, norm: nn.Module) -> bool:
        kind = type(norm)
        attributes: dict[str, Any] = norm.__dict__
        vectors: dict[str, UnitDim] = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}
        if kind in CHANNEL_NORMS and attributes["num_features"] == self.width:
            self._add(name, norm, vectors, "num_features")
            return True
        if kind in FEATURE_NORMS and not self.has_channels and tuple(attributes["normalized_shape"]) == (self.width,):
            self._add(name, norm, vectors, "normalized_shape")
            return True
        if kind is nn.GroupNorm and attributes["num_channels"] == self.width:
            group_size = self.width // attributes["num_groups"]
            self.group_size = math.lcm(self.group_size, group_size)
            self._add(name, norm, vectors, "num_channels")
            self.counts[f"{name}.num_groups"] = -group_size
            return True
        return False

    def complete(self, name: str, layer: nn.Module, normed: bool) -> Axis | None:
        """The axis whose units a layer uses; None if the layer's inputs are not these units."""
        is_linear = type(layer) is nn.Linear
        input_attribute = "in_features" if is_linear else "in_channels"
        inputs: int = getattr(layer, input_attribute)
        size, rest = divmod(self.width, self.group_size)
        if rest or inputs % self.width or size < 2:
            return None
        if not self.is_flattened and (inputs != self.width or self.has_channels == is_linear):
            return None
        num_positions = inputs // self.width
        repeats = 1 if self.has_channels else num_positions  # flattened: all positions of a channel, or all features
        in_dim = 0 if type(layer) in TRANSPOSED_CONVOLUTIONS else 1
        counts = {key: self.group_size * n if n > 0 else self.group_size // -n for key, n in self.counts.items()}
        counts[f"{name}.{input_attribute}"] = num_positions * self.group_size
        return Axis(size, self.made_by, {f"{name}.weight": (in_dim, repeats)}, counts, normed)

    def _add(self, name: str, module: nn.Module, dims: Mapping[str, UnitDim], *counts: str) -> None:
        held = {tensor for tensor, _ in (*module.named_parameters(), *module.named_buffers())}
        self.made_by |= {f"{name}.{tensor}": dim for tensor, dim in dims.items() if tensor in held}
        self.counts |= {f"{name}.{count}": 1 for count in counts}


def _removes_scale(norm: nn.Module, layer: nn.Module) -> bool:
    """Whether a module is a norm whose output does not change when the weight of the layer before it is scaled."""
    if type(norm) in NORMS and getattr(norm, "track_running_stats", False):
        return isinstance(norm, _BatchNorm) and norm.training
    return type(norm) in NORMS and layer.bias is None


def _is_linear_or_convolution(module: nn.Module) -> bool:
    if "weight" not in module._parameters:  # computed from others, as by spectral_norm
        return False
    kinds = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS
    return type(module) is nn.Linear or (type(module) in kinds and vars(module)["groups"] == 1)
