"""Segments of a model that is not an nn.Sequential, found by torch.fx."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

from torch import fx, nn

from thinwire.errors import UsageError
from thinwire.surgery.blocks import list_names, resolve_layer_names

_TRACING = threading.Lock()  # torch.fx patches nn.Module.__call__ while it traces


class NotTraceable(UsageError):
    """torch.fx cannot follow the forward of a model."""


def trace_segments(model: nn.Module, cut_at: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The segments of a model, each with the name of its first layer; see segments_of."""
    graph = _trace(model, cut_at)
    calls = [node for node in graph.nodes if node.op == "call_module"]
    cut_at = resolve_layer_names(cut_at, [str(node.target) for node in calls[1:]])
    inputs: dict[fx.Node, fx.Node] = {}  # the first layer of each segment but the first, and the segment's input
    for node in calls[1:]:
        crossing, is_named = _crossing(graph, node), str(node.target) in cut_at
        if is_named and len(crossing) != 1:
            raise _skip_error(node, crossing, [n for n in calls[1:] if len(_crossing(graph, n)) == 1])
        if len(crossing) == 1 and (is_named or has_matrix(model.get_submodule(str(node.target)))):
            inputs[node] = crossing[0]
    parts: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node in inputs:
            parts.append([])
        parts[-1].append(node)
    names = [str(calls[0].target) if calls else "the input", *(str(node.target) for node in inputs)]
    ends = pairwise([None, *inputs.values(), None])
    modules = [_submodel(model, nodes, *in_out) for nodes, in_out in zip(parts, ends, strict=True)]
    return list(zip(names, modules, strict=True))


def has_matrix(layer: nn.Module) -> bool:
    """Whether a layer has a parameter of two or more dimensions."""
    return any(p.ndim > 1 for p in layer.parameters())


class _ShallowTracer(fx.Tracer):
    """Traces a model only as deep as it may be cut; every other module is one call."""

    def __init__(self, cut_at: Sequence[str]) -> None:
        super().__init__()
        self.cut_at = cut_at

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        holds_a_cut = any(name.startswith(f"{module_qualified_name}.") for name in self.cut_at)
        return type(m) is not nn.Sequential and not holds_a_cut


def _trace(model: nn.Module, cut_at: Sequence[str]) -> fx.Graph:
    try:
        with _TRACING:
            return _ShallowTracer(cut_at).trace(model)
    except Exception as error:
        is_compiled = hasattr(model, "_orig_mod")
        advice = "give the model without torch.compile" if is_compiled else "write it as an nn.Sequential of its layers"
        raise NotTraceable(
            f"{type(model).__name__} cannot be cut into blocks: torch.fx cannot follow its forward ({error}); {advice}"
        ) from error


def _submodel(model: nn.Module, nodes: Sequence[fx.Node], into: fx.Node | None, out: fx.Node | None) -> fx.GraphModule:
    """Some nodes of a model as a module, from one tensor to another; None: the model's input, or its output."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {} if into is None else {into: graph.placeholder("z")}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # a weight, which is read where it is used
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        if node.op != "get_attr":
            copies[node] = graph.node_copy(node, copy_of)
            _read_training_mode(copies[node])
    if out is not None:
        graph.output(copies[out])
    return fx.GraphModule(model, graph)


def _read_training_mode(node: fx.Node) -> None:
    """Make a dropout that was traced with `training=self.training` read the block's own mode each time it runs."""
    has_keyword = "training" in node.kwargs
    is_dropout = node.op == "call_function" and "dropout" in getattr(node.target, "__name__", "")
    if not has_keyword and not (is_dropout and len(node.args) > 2):
        return
    with node.graph.inserting_before(node):
        mode = node.graph.create_node("get_attr", "training")
    if has_keyword:
        node.update_kwarg("training", mode)
    else:
        node.update_arg(2, mode)


def _crossing(graph: fx.Graph, at: fx.Node) -> list[fx.Node]:
    """Tensors made before a node and used by it or after it; not weights, which are read where they are used."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [
        node
        for node in graph.nodes
        if order[node] < order[at] and node.op != "get_attr" and any(order[user] >= order[at] for user in node.users)
    ]


def _skip_error(node: fx.Node, crossing: Sequence[fx.Node], possible: Sequence[fx.Node]) -> UsageError:
    """The error for a cut that a skip connection crosses."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    users = {n: next(u for u in n.users if order[u] >= order[node]) for n in crossing}
    what = ", ".join(f"{_name_of(n)} (for {_name_of(u)})" for n, u in users.items())
    return UsageError(
        f"the model cannot be cut at {node.target}: {len(crossing)} tensors cross there, {what}; a block passes on "
        f"one. Cut where no skip connection is open, as at the beginning of a residual block; "
        f"possible: {list_names([_name_of(n) for n in possible])}"
    )


def _name_of(node: fx.Node) -> str:
    """A layer's name in the model, or a function's name."""
    return str(node.target) if node.op in ("call_module", "placeholder") else node.name
