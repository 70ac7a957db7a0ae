"""Segments of a model that torch.fx cannot follow, but whose forward runs the blocks of an nn.ModuleList in a row.

Before the first batch only the names are known. One forward pass on an example then shows whether the blocks are a
chain (`chain_recording`), and each segment becomes the model's own forward without the rest (`chain_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.surgery.blocks import resolve_layer_names
from thinwire.surgery.chain_parts import make_part
from thinwire.surgery.chain_recording import NoChain, record_chain
from thinwire.surgery.costs import activations
from thinwire.surgery.tracing import has_matrix


class BlockChain(NamedTuple):
    """An nn.ModuleList whose members may be a chain, and the segments that the model then has.

    Positions are 0 for what comes before the blocks, 1 … n for the blocks, and n + 1 for what follows them.
    """

    path: str  # of the nn.ModuleList
    names: list[str]  # of each segment's first layer
    bounds: list[int]  # segment i has the positions from bounds[i] to bounds[i + 1]

    def follow(self, model: nn.Module, example: Tensor) -> list[nn.Module]:
        """The segments, for inputs like the example: model(x) = s_n(…s_1(x)), bit for bit, or else a UsageError."""
        try:
            recording = record_chain(model, self.path, example)
            parts = [make_part(model, self.path, recording, *ends) for ends in pairwise(self.bounds)]
            _check(parts, [example, *(recording.passed[bound - 1] for bound in self.bounds[1:-1]), recording.output])
        except NoChain as reason:
            raise UsageError(
                f"{type(model).__name__} cannot be cut into blocks: torch.fx cannot follow its forward, and "
                f"{self.path} is no chain of blocks: {reason}; write it as an nn.Sequential of its layers"
            ) from None
        return list(parts)


def _check(parts: Sequence[nn.Module], expected: Sequence[Tensor]) -> None:
    """Raise NoChain if parts do not pass on exactly what is expected of them."""
    try:
        found = activations(parts, expected[0])
    except Exception as error:
        raise NoChain(f"they do not run one after the other ({type(error).__name__}: {error})") from error
    if not all(a.is_meta or torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        raise NoChain("run one after the other, they compute something else")


def find_chain(model: nn.Module, cut_at: Sequence[str]) -> BlockChain | None:
    """The nn.ModuleList with the most parameters, if any has two members or more, as the blocks of a model.

    Modules with a weight matrix outside it are segments of their own, one before the blocks and one behind them, as
    they are registered.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    sizes = {name: sum(p.numel() for p in found.parameters()) for name, found in lists.items() if len(found) > 1}
    if not sizes or not any(sizes.values()):
        return None
    path = max(sizes, key=lambda name: sizes[name])
    order = [name for name, _ in model.named_modules()]
    inside = [name for name in order if name == path or name.startswith(f"{path}.")]
    with_matrix = [
        name
        for name, module in model.named_modules()
        if name not in inside and lists[path] not in module.modules() and has_matrix(module)
    ]
    begin = order.index(path)
    first = [name for name in with_matrix if order.index(name) < begin][:1]
    last = [name for name in with_matrix if order.index(name) > begin][:1]
    blocks = [f"{path}.{name}" for name, _ in lists[path].named_children()]
    names = [*first, *blocks, *last]
    resolve_layer_names(cut_at, names[1:])
    starts = [0, *(range(1, len(blocks) + 1) if first else range(2, len(blocks) + 1))]
    return BlockChain(path, names, [*starts, *([len(blocks) + 1] if last else []), len(blocks) + 2])
