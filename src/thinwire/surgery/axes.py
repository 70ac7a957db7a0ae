"""Axes: hidden units, channels or heads that a network has many of, and which tensors have a part for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from thinwire.errors import UsageError
from thinwire.surgery.attention import UnpackedAttention
from thinwire.surgery.lowrank import uses
from thinwire.surgery.suggestions import not_found

Along = int | tuple[int, int]  # a dimension, or (dimension, how often all units come there in a row)
CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
TRANSPOSED = {nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
CHANNEL_NORMS = {
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
}  # fmt: skip
UNIT_NORMS = {nn.LayerNorm, nn.RMSNorm}
NORMS = CHANNEL_NORMS | UNIT_NORMS | {nn.GroupNorm}
PASSED = {"activation", "dropout"}  # modules of torch.nn in which each unit is on its own
PASSED_BY_CHANNELS = {"pooling", "padding", "upsampling"}
MIXING = {nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention}


@dataclass(frozen=True)
class Axis:
    """Units of which each rank may have some: `size` of them, alike, and summed over by what takes them in.

    `made_by` names the tensors that make them and `used_by` those that take them in, each with the dimension that is
    made up of the units; (0, 3) is dimension 0 with all units three times in a row, as queries, keys and values have
    it. `counts` are attributes that hold a number of units, and how many for each. `normed` says that a norm
    follows, so that the size of the sum does not matter. A module of yours states its own as `thinwire_axes`:

    >>> class Gated(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(8, 2 * 32), nn.Linear(32, 8)
    ...         self.thinwire_axes = [Axis(32, {"up.weight": (0, 2), "up.bias": (0, 2)}, {"down.weight": 1})]
    ...     def forward(self, x):
    ...         return self.down(nn.functional.glu(self.up(x)))
    >>> sorted(axes_of(nn.Sequential(Gated(), nn.ReLU()))[0].made_by)
    ['0.up.bias', '0.up.weight']
    """

    size: int
    made_by: Mapping[str, Along]
    used_by: Mapping[str, Along]
    counts: Mapping[str, int] = field(default_factory=dict)
    normed: bool = False

    def inside(self, path: str) -> Axis:
        """The same axis as the module that contains this one at a path sees it."""
        made_by, used_by = (
            {_join(path, name): along for name, along in tensors.items()} for tensors in (self.made_by, self.used_by)
        )
        counts = {_join(path, name): number for name, number in self.counts.items()}
        return replace(self, made_by=made_by, used_by=used_by, counts=counts)


@dataclass(frozen=True)
class Blocks:
    """Whole residual blocks x + branch(x), and of each the tensors that end its branches."""

    branches: Mapping[str, tuple[str, ...]]
    normed = False

    @property
    def size(self) -> int:
        return len(self.branches)


def axes_of(model: nn.Module) -> list[Axis]:
    """The axes of a model: those that its modules declare, and those found in each nn.Sequential.

    Inside a chain of linear layers, convolutions, norms and what treats every unit alike, all but the first input
    and the last output is an axis.
    """
    declared = list(_declared(model))
    for axis in declared:
        _check(model, axis)
    taken = {(name, _dim(along)) for axis in declared for name, along in _tensors(axis)}
    seen = uses(model)

    def alone(module: nn.Module) -> bool:
        return not parametrize.is_parametrized(module) and all(seen[id(p)] == 1 for p in module.parameters())

    found = [axis for chain in _chains(model) for axis in _follow(chain, alone)]
    free = [axis for axis in found if not taken & {(name, _dim(along)) for name, along in _tensors(axis)}]
    if not declared and not free:
        raise not_found(model)
    return [*declared, *free]


def blocks_of(model: nn.Module) -> Blocks:
    """The residual blocks of a model: modules with `thinwire_branches`, the tensors that end their branches."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        branches = getattr(module, "thinwire_branches", ())
        if branches and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = tuple(_join(name, tensor) for tensor in branches)
    if not found:
        raise UsageError(
            f"no residual blocks are found in {type(model).__name__}; a module that computes x + branch(x) says so by "
            'thinwire_branches = ["conv2.weight", "conv2.bias"], the tensors that end its branch; or try cut=units'
        )
    return Blocks(found)


# ---- what modules declare


def _declared(model: nn.Module) -> Iterator[Axis]:
    for name, module in model.named_modules():
        own: Iterable[Axis] = getattr(module, "thinwire_axes", ())
        if not isinstance(own, list | tuple) or not all(isinstance(axis, Axis) for axis in own):
            raise UsageError(f"thinwire_axes of {name or 'the model'} is {own!r}; give a list of tw.Axis")
        if isinstance(module, UnpackedAttention):
            own = [_heads(module)]
        elif type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer) and not own:
            own = [_feed_forward(module)]
        yield from (axis.inside(name) for axis in own)


def _heads(attention: UnpackedAttention) -> Axis:
    """Heads of torch's attention, whose queries, keys and values are made at once."""
    made_by = {f"in_proj.{name}": (0, 3) for name, _ in attention.in_proj.named_parameters()}
    return Axis(attention.num_heads, made_by, {"out_proj.weight": 1}, {"num_heads": 1})


def _feed_forward(layer: nn.Module) -> Axis:
    """Hidden units of torch's transformer layers."""
    inner = layer.get_submodule("linear1")
    made_by = {f"linear1.{name}": 0 for name, _ in inner.named_parameters()}
    return Axis(len(inner.get_parameter("weight")), made_by, {"linear2.weight": 1})


def _check(model: nn.Module, axis: Axis) -> None:
    for name, along in _tensors(axis):
        try:
            tensor = (model.get_parameter if name in dict(model.named_parameters()) else model.get_buffer)(name)
        except AttributeError:
            raise UsageError(f"thinwire_axes: the model has no tensor {name}") from None
        dim, repeats = (along, 1) if isinstance(along, int) else along
        if dim >= tensor.dim() or tensor.shape[dim] % (repeats * axis.size):
            raise UsageError(
                f"thinwire_axes: {name} is {'×'.join(map(str, tensor.shape))}, so its dimension {dim} is not made up "
                f"of {f'{repeats} times ' if repeats > 1 else ''}{axis.size} units"
            )


def _tensors(axis: Axis) -> Iterator[tuple[str, Along]]:
    yield from axis.made_by.items()
    yield from axis.used_by.items()


def _dim(along: Along) -> int:
    return along if isinstance(along, int) else along[0]


# ---- what is found in chains

Chain = list[tuple[str, nn.Module]]


def _chains(module: nn.Module, path: str = "") -> Iterator[Chain]:
    """Each nn.Sequential, with those that it directly contains as parts of it."""
    chain = list(_flat(module, path)) if type(module) is nn.Sequential else [(path, module)]
    if type(module) is nn.Sequential:
        yield chain
    for name, member in chain:
        for child, inner in member.named_children():
            yield from _chains(inner, _join(name, child))


def _flat(sequential: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, member in sequential._modules.items():  # a module that comes twice counts twice
        if member is None:
            continue
        if type(member) is nn.Sequential:
            yield from _flat(member, _join(path, name))
        else:
            yield _join(path, name), member


class _Open:
    """Units that a layer has just made, on their way to the layer that takes them in."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.by_channels = type(layer) is not nn.Linear
        self.width = _width(layer)
        self.granule = 1  # of units that a group norm keeps together
        self.made_by: dict[str, Along] = {}
        self.counts: dict[str, int] = {}
        self.flat = False
        made = 1 if type(layer) in TRANSPOSED else 0
        self._add(name, layer, {"weight": made, "bias": 0}, "out_channels" if self.by_channels else "out_features")

    def passes(self, name: str, module: nn.Module) -> bool:
        """Go on through a module, if each unit does so on its own."""
        kind = type(module)
        about: dict[str, Any] = module.__dict__
        place = kind.__module__.removeprefix("torch.nn.modules.")
        if kind is nn.PReLU:
            if about["num_parameters"] == self.width:
                self._add(name, module, {"weight": 0}, "num_parameters")
            return about["num_parameters"] in (1, self.width)
        if (place in PASSED and kind not in MIXING) or kind is nn.Identity:
            return True
        if kind is nn.Flatten:
            self.flat = True
            return bool(about["start_dim"] == 1 and about["end_dim"] == -1)
        if self.flat:
            return False
        if place in PASSED_BY_CHANNELS and self.by_channels:
            return True
        vectors: dict[str, Along] = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}
        if kind in CHANNEL_NORMS and about["num_features"] == self.width:
            self._add(name, module, vectors, "num_features")
            return True
        if kind in UNIT_NORMS and not self.by_channels and tuple(about["normalized_shape"]) == (self.width,):
            self._add(name, module, vectors, "normalized_shape")
            return True
        if kind is nn.GroupNorm and about["num_channels"] == self.width:
            self.granule = math.lcm(self.granule, self.width // about["num_groups"])
            self._add(name, module, vectors, "num_channels")
            self.counts[f"{name}.num_groups"] = -(self.width // about["num_groups"])  # so many units are one
            return True
        if kind in CONVOLUTIONS and about["groups"] == about["in_channels"] == about["out_channels"] == self.width:
            self._add(name, module, {"weight": 0, "bias": 0}, "in_channels", "out_channels", "groups")
            return True
        return False

    def closed(self, name: str, layer: nn.Module, normed: bool) -> Axis | None:
        """The axis, taken in by a layer; None if that does not fit."""
        kind = type(layer)
        inputs: int = getattr(layer, "in_features" if kind is nn.Linear else "in_channels")
        size, rest = divmod(self.width, self.granule)
        if rest or inputs % self.width or size < 2:
            return None
        if not self.flat and (inputs != self.width or self.by_channels == (kind is nn.Linear)):
            return None
        places = inputs // self.width
        repeats = 1 if self.by_channels else places  # channels come in blocks of places, units as whole rows of them
        used: Along = (0 if kind in TRANSPOSED else 1, repeats)
        counts = {key: self.granule * n if n > 0 else self.granule // -n for key, n in self.counts.items()}
        counts[f"{name}.{'in_features' if kind is nn.Linear else 'in_channels'}"] = places * self.granule
        return Axis(size, self.made_by, {f"{name}.weight": used}, counts, normed)

    def _add(self, name: str, module: nn.Module, dims: Mapping[str, Along], *counts: str) -> None:
        held = {tensor for tensor, _ in (*module.named_parameters(), *module.named_buffers())}
        self.made_by |= {f"{name}.{tensor}": along for tensor, along in dims.items() if tensor in held}
        self.counts |= {f"{name}.{count}": 1 for count in counts}


def _follow(chain: Chain, alone: Callable[[nn.Module], bool]) -> Iterator[Axis]:
    open_: _Open | None = None
    for i, (name, module) in enumerate(chain):
        if not alone(module):
            open_ = None
        elif open_ is not None and open_.passes(name, module):
            continue
        elif _is_layer(module):
            axis = open_ and open_.closed(name, module, i + 1 < len(chain) and _absorbs(chain[i + 1][1], module))
            if axis:
                yield axis
            open_ = _Open(name, module)
        else:
            open_ = None


def _absorbs(norm: nn.Module, layer: nn.Module) -> bool:
    """Whether what follows a layer is the same however large the layer's sums are."""
    if type(norm) in NORMS and getattr(norm, "track_running_stats", False):
        return isinstance(norm, _BatchNorm) and norm.training
    return type(norm) in NORMS and layer.bias is None


def _is_layer(module: nn.Module) -> bool:
    if "weight" not in module._parameters:  # computed from others, as by spectral_norm
        return False
    return type(module) is nn.Linear or (type(module) in CONVOLUTIONS | TRANSPOSED and vars(module)["groups"] == 1)


def _width(layer: nn.Module) -> int:
    width: int = getattr(layer, "out_features" if type(layer) is nn.Linear else "out_channels")
    return width


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
