"""What to declare in a model whose hidden units cannot be found: a line to type, where shapes leave no doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from thinwire.errors import UsageError

FORM = 'for attention thinwire_axes = [tw.Axis(heads, {"qkv.weight": (0, 3)}, {"out.weight": 1}, {"heads": 1})]'


class Hidden(NamedTuple):
    """Units that linear layers of one module make for others of it."""

    size: int
    made_by: tuple[str, ...]
    used_by: tuple[str, ...]


def not_found(model: nn.Module) -> UsageError:
    """The error for a model without axes, with the line to add, or else its form."""
    said = f"no hidden units to share out are found in {type(model).__name__}"
    if sum(type(module) is nn.Linear for module in model.modules()) < 2:
        return UsageError(f"{said}: it needs two layers with units between them, in an nn.Sequential")
    places: dict[Hidden, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        for hidden in _hidden(module):
            places[hidden].append(path)
    if not places:
        return UsageError(
            f"{said}: its linear layers are in no nn.Sequential; put those with hidden units between them into one, or "
            f"tell which dimension of which tensor has a part for each unit, {FORM}"
        )
    hidden, paths = next(iter(places.items()))
    layers = " and ".join(_full(paths[0], name.removesuffix(".weight")) for name in _layers(hidden))
    return UsageError(
        f"{said}: {layers} are not in one nn.Sequential; put them into one, or tell which dimension of which tensor "
        f"has a part for each unit, if these do: {_line(hidden, paths)}"
    )


def _hidden(module: nn.Module) -> Iterator[Hidden]:
    """From a layer of w → h to the next that takes h. Square ones may be queries, keys or values: they say nothing."""
    linear = {name: m for name, m in module.named_children() if type(m) is nn.Linear}
    order = list(linear)
    for i, first in enumerate(order):
        width, size = linear[first].in_features, linear[first].out_features
        makers = [n for n in order if (linear[n].in_features, linear[n].out_features) == (width, size)]
        users = [n for n in order if linear[n].in_features == size]
        after = [n for n in order[i + 1 :] if n in users]
        if width == size or first != makers[0] or len(makers) > 2 or not after:  # two: one of them a gate
            continue
        users = after[:1] if linear[after[0]].out_features == size else users
        if not _held_elsewhere(module, linear, size):
            made_by = [f"{maker}.{tensor}" for maker in makers for tensor, _ in linear[maker].named_parameters()]
            yield Hidden(size, tuple(made_by), tuple(f"{user}.weight" for user in users))


def _held_elsewhere(module: nn.Module, linear: dict[str, nn.Linear], size: int) -> bool:
    """Whether something else, a norm say, may have a part for each unit too."""
    layers = {id(p) for layer in linear.values() for p in layer.parameters()}
    return any(size in p.shape for p in (*module.parameters(), *module.buffers()) if id(p) not in layers)


def _line(hidden: Hidden, paths: Sequence[str]) -> str:
    """The declaration, for every module that has such units."""
    many = len(paths) > 1
    names = {n: f'f"{{at}}.{n}"' if many else f'"{_full(paths[0], n)}"' for n in (*hidden.made_by, *hidden.used_by)}
    made_by = ", ".join(f"{names[name]}: 0" for name in hidden.made_by)
    used_by = ", ".join(f"{names[name]}: 1" for name in hidden.used_by)
    axis = f"tw.Axis({hidden.size}, {{{made_by}}}, {{{used_by}}})"
    every = f" for at in {list(paths)}" if many else ""
    return f"model.thinwire_axes = [{axis}{every}]"


def _layers(hidden: Hidden) -> list[str]:
    return [name for name in (*hidden.made_by, *hidden.used_by) if name.endswith(".weight")]


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
