"""The error for a model without axes, with the declaration to type where shapes leave no doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from thinwire.errors import UsageError
from thinwire.surgery.axes.axis import join_names

ATTENTION_EXAMPLE = (
    'for attention thinwire_axes = [tw.Axis(heads, {"qkv.weight": (0, 3)}, {"out.weight": 1}, {"heads": 1})]'
)


class HiddenUnits(NamedTuple):
    """Units that some linear layers of a module make and others of the same module use."""

    size: int
    made_by: tuple[str, ...]
    used_by: tuple[str, ...]


def no_axes_error(model: nn.Module) -> UsageError:
    """The error for a model without axes, with the line to add, or else an example of one."""
    problem = f"no hidden units that ranks could divide are found in {type(model).__name__}"
    if sum(type(module) is nn.Linear for module in model.modules()) < 2:
        return UsageError(f"{problem}: it needs two layers with units between them, in an nn.Sequential")
    paths_by_units: dict[HiddenUnits, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        for units in _hidden_units(module):
            paths_by_units[units].append(path)
    if not paths_by_units:
        return UsageError(
            f"{problem}: its linear layers are in no nn.Sequential; put those with hidden units between them into one, "
            f"or declare which dimension of which tensor has a part for each unit, {ATTENTION_EXAMPLE}"
        )
    units, paths = next(iter(paths_by_units.items()))
    weights = [name for name in (*units.made_by, *units.used_by) if name.endswith(".weight")]
    layers = " and ".join(join_names(paths[0], name.removesuffix(".weight")) for name in weights)
    return UsageError(
        f"{problem}: {layers} are not in one nn.Sequential; put them into one, or declare which dimension of which "
        f"tensor has a part for each unit, if these do: {_declaration(units, paths)}"
    )


def _hidden_units(module: nn.Module) -> Iterator[HiddenUnits]:
    """Units of a layer w → h that later layers take in. Square layers are left out: they may be queries or keys."""
    linear = {name: m for name, m in module.named_children() if type(m) is nn.Linear}
    order = list(linear)
    for i, first in enumerate(order):
        width, size = linear[first].in_features, linear[first].out_features
        makers = [n for n in order if (linear[n].in_features, linear[n].out_features) == (width, size)]
        users = [n for n in order if linear[n].in_features == size]
        later_users = [n for n in order[i + 1 :] if n in users]
        if width == size or first != makers[0] or len(makers) > 2 or not later_users:  # two makers: one is a gate
            continue
        users = later_users[:1] if linear[later_users[0]].out_features == size else users
        if not _is_size_used_elsewhere(module, linear, size):
            made_by = [f"{maker}.{tensor}" for maker in makers for tensor, _ in linear[maker].named_parameters()]
            yield HiddenUnits(size, tuple(made_by), tuple(f"{user}.weight" for user in users))


def _is_size_used_elsewhere(module: nn.Module, linear: dict[str, nn.Linear], size: int) -> bool:
    """Whether a tensor outside the linear layers, of a norm for example, may have a part for each unit too."""
    layers = {id(p) for layer in linear.values() for p in layer.parameters()}
    return any(size in p.shape for p in (*module.parameters(), *module.buffers()) if id(p) not in layers)


def _declaration(units: HiddenUnits, paths: Sequence[str]) -> str:
    """The line that declares these units, for every module that has them."""
    is_repeated = len(paths) > 1
    names = {
        name: f'f"{{at}}.{name}"' if is_repeated else f'"{join_names(paths[0], name)}"'
        for name in (*units.made_by, *units.used_by)
    }
    made_by = ", ".join(f"{names[name]}: 0" for name in units.made_by)
    used_by = ", ".join(f"{names[name]}: 1" for name in units.used_by)
    axis = f"tw.Axis({units.size}, {{{made_by}}}, {{{used_by}}})"
    loop = f" for at in {list(paths)}" if is_repeated else ""
    return f"model.thinwire_axes = [{axis}{loop}]"
