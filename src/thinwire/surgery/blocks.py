"""Blocks: a model cut into parts that are run one after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import fx, nn

from thinwire.common.tensors import named_tensors
from thinwire.errors import UsageError

_TRACING = threading.Lock()  # torch.fx replaces the call of every module while it traces one


class Segment(NamedTuple):
    """A part of a model that is not cut any further, and the layer that it begins with."""

    name: str
    module: nn.Module


def segments_of(model: nn.Module, at: Sequence[str] = ()) -> list[Segment]:
    """The smallest parts into which a model may be cut, in the order they run: model(x) = u_n(…u_1(x)).

    A unit begins at each layer with a matrix of weights, and at the layers named in `at`; what follows without one
    (norms, activations, pooling) belongs to it. Of a model that is not an nn.Sequential, torch.fx finds the layers that
    exactly one tensor goes into.

    >>> net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    >>> [unit.name for unit in segments_of(net)]
    ['0', '3']
    """
    if type(model) is not nn.Sequential:
        return _traced_units(model, at)
    layers = _opened(model)
    at = resolved(at, [name for name, _ in layers[1:]])
    groups: list[tuple[str, list[nn.Module]]] = []
    heavy = False  # does the last group have a matrix yet?
    for name, layer in layers:
        if not groups or name in at or (_has_matrix(layer) and (heavy or groups[1:])):
            groups.append((name, []))
            heavy = False
        heavy = heavy or _has_matrix(layer)
        groups[-1][1].append(layer)
    return [Segment(name, nn.Sequential(*members)) for name, members in groups]


def _opened(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of a sequence, with those of plain sequences inside of it."""
    found: list[tuple[str, nn.Module]] = []
    for name, layer in model._modules.items():
        assert layer is not None
        inside = type(layer) is nn.Sequential and not layer._forward_hooks and not layer._forward_pre_hooks
        found += _opened(layer, f"{prefix}{name}.") if inside else [(prefix + name, layer)]  # type: ignore[arg-type]
    return found


def _has_matrix(layer: nn.Module) -> bool:
    return any(p.ndim > 1 for p in layer.parameters())


class _Outline(fx.Tracer):
    """Looks into a model no deeper than where it may be cut: everything else is one call."""

    def __init__(self, at: Sequence[str]) -> None:
        super().__init__()
        self.at = at

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        holds_a_cut = any(name.startswith(f"{module_qualified_name}.") for name in self.at)
        return type(m) is not nn.Sequential and not holds_a_cut


def _traced_units(model: nn.Module, at: Sequence[str]) -> list[Segment]:
    tracer = _Outline(at)
    try:
        with _TRACING:
            graph = tracer.trace(model)
    except Exception as error:
        compiled = hasattr(model, "_orig_mod")
        what_to_do = (
            "give the model without torch.compile" if compiled else "write it as an nn.Sequential of its layers"
        )
        raise UsageError(
            f"{type(model).__name__} cannot be cut into blocks: torch.fx cannot follow its forward ({error}); "
            f"{what_to_do}"
        ) from error
    calls = [node for node in graph.nodes if node.op == "call_module"]
    at = resolved(at, [str(node.target) for node in calls[1:]])
    cuts: dict[fx.Node, fx.Node] = {}  # a unit's first layer, and what goes into it
    for node in calls[1:]:
        crossing, is_asked_for = _crossing(graph, node), str(node.target) in at
        if is_asked_for and len(crossing) != 1:
            raise UsageError(_skips(node, crossing, [n for n in calls[1:] if len(_crossing(graph, n)) == 1]))
        if len(crossing) == 1 and (is_asked_for or _has_matrix(model.get_submodule(str(node.target)))):
            cuts[node] = crossing[0]
    parts: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node in cuts:
            parts.append([])
        parts[-1].append(node)
    names = [str(calls[0].target) if calls else "the input", *(str(node.target) for node in cuts)]
    ins = [None, *cuts.values(), None]
    modules = [_part(model, nodes, *ends) for nodes, ends in zip(parts, pairwise(ins), strict=True)]
    return [Segment(name, module) for name, module in zip(names, modules, strict=True)]


def _part(model: nn.Module, nodes: Sequence[fx.Node], into: fx.Node | None, out: fx.Node | None) -> fx.GraphModule:
    """Some nodes of a model as a module: from one tensor, or the model's input, to another, or its output."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {} if into is None else {into: graph.placeholder("z")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in made:  # a weight, which is read where it is used
            made[node] = graph.node_copy(node)
        return made[node]

    for node in nodes:
        if node.op != "get_attr":
            made[node] = graph.node_copy(node, copied)
            _follow_mode(made[node])
    if out is not None:
        graph.output(made[out])
    return fx.GraphModule(model, graph)


def _follow_mode(node: fx.Node) -> None:
    """A dropout that was traced with `training=self.training` asks the block's own mode again, each time."""
    place = {"training": node.kwargs.get("training")} if "training" in node.kwargs else {}
    is_dropout = node.op == "call_function" and "dropout" in getattr(node.target, "__name__", "")
    if not place and not (is_dropout and len(node.args) > 2):
        return
    with node.graph.inserting_before(node):
        mode = node.graph.create_node("get_attr", "training")
    if place:
        node.update_kwarg("training", mode)
    else:
        node.update_arg(2, mode)


def _crossing(graph: fx.Graph, at: fx.Node) -> list[fx.Node]:
    """What is made before a node and needed by it or after it. Weights need not cross: they go where they are used."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [
        node
        for node in graph.nodes
        if order[node] < order[at] and node.op != "get_attr" and any(order[user] >= order[at] for user in node.users)
    ]


def _skips(node: fx.Node, crossing: Sequence[fx.Node], possible: Sequence[fx.Node]) -> str:
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    behind = {n: next(u for u in n.users if order[u] >= order[node]) for n in crossing}
    what = ", ".join(f"{_called(n)} (for {_called(u)})" for n, u in behind.items())
    return (
        f"the model cannot be cut at {node.target}: {len(crossing)} tensors cross there, {what}; a block passes on "
        f"one. Cut where no skip connection is open, as at the beginning of a residual block; "
        f"possible: {_some([_called(n) for n in possible])}"
    )


def _called(node: fx.Node) -> str:
    """A layer by its name in the model, a function by its own."""
    return str(node.target) if node.op in ("call_module", "placeholder") else node.name


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def resolved(at: Sequence[str], possible: Sequence[str]) -> list[str]:
    """The layers that blocks shall begin with; a name of several layers stands for the first of them."""
    found = []
    for name in at:
        layer = next((p for p in possible if p == name or p.startswith(f"{name}.")), None)
        if layer is None:
            whole = next(
                (f", which is inside {p}, and that is run as a whole" for p in possible if name.startswith(f"{p}.")), ""
            )
            raise UsageError(
                f"no block but the first can begin with layer {name!r}{whole}; possible: {_some(possible)}"
            )
        found.append(layer)
    return found


def balanced(costs: Sequence[float], num_blocks: int) -> list[int]:
    """Where blocks begin so that the dearest is as cheap as can be, and of those ways the one with the least Σ cost².

    >>> balanced([1, 1, 1, 3], 2)
    [0, 3]
    """
    n = len(costs)
    until = [0.0]
    for cost in costs:
        until.append(until[-1] + cost)

    def price(begin: int, end: int) -> float:
        return until[end] - until[begin]

    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, 0.0, [])}
    for k in range(1, num_blocks + 1):
        for end in range(k, n - (num_blocks - k) + 1):
            ways = [
                (max(best[k - 1, begin][0], price(begin, end)), best[k - 1, begin][1] + price(begin, end) ** 2, begin)
                for begin in range(k - 1, end)
                if (k - 1, begin) in best
            ]
            top, squares, begin = min(ways)
            best[k, end] = top, squares, [*best[k - 1, begin][2], begin]
    return best[num_blocks, n][2]


def check_ties(blocks: Sequence[nn.Module], model: nn.Module) -> None:
    """Raise UsageError if two blocks have a tensor in common: they would train it apart."""
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    owners: dict[int, int] = {}
    for number, block in enumerate(blocks, 1):
        for tensor in named_tensors(block).values():
            first = owners.setdefault(id(tensor), number)
            if first != number:
                tied = " and ".join(dict.fromkeys(names[id(tensor)]))
                raise UsageError(
                    f"{tied} are one tensor, which blocks {first} and {number} would train apart; "
                    "untie it, or cut so that one block holds all of its uses"
                )
