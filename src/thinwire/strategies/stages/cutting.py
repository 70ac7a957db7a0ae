"""Where a model is cut into blocks, one for each stage: at named layers, or so that blocks cost nearly the same.

Of cuts that are nearly as equal as can be, the one that passes on least is taken: it is sent in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.errors import UsageError
from thinwire.surgery.blocks import balanced_starts, check_ties, resolve_layer_names
from thinwire.surgery.costs import flops, seconds
from thinwire.surgery.segments import Segment

Cut = Literal["flops", "time", "parameters"] | list[str]


def layer_names(strategy: str, cut: Cut) -> list[str]:
    """The layers that the option `cut` names, if it names layers; raise UsageError if it names none, or one twice."""
    names = cut if isinstance(cut, list) else []
    if len(set(names)) < len(names) or cut == []:
        raise UsageError(
            f"{strategy}: cut={cut}; name each layer that a block shall begin with once, but not the first"
        )
    return names


def find_starts(
    cut: Cut, num_blocks: int, segments: Sequence[Segment], inputs: Sequence[Tensor], comm: Comm
) -> list[int]:
    """The segments at which blocks begin, equal on all ranks. `inputs` has an example of each segment's. Collective."""
    if isinstance(cut, list):
        begins = resolve_layer_names(cut, [segment.name for segment in segments[1:]])
        return [0, *(i for i, segment in enumerate(segments) if segment.name in begins)]
    starts = [0] * num_blocks
    if comm.rank == 0:
        sizes = [float(x.numel() * x.element_size()) for x in inputs]
        starts = balanced_starts(_costs(cut, segments, inputs), num_blocks, sizes)
    with comm.ledger.purpose("start"):
        return [int(i) for i in comm.broadcast(torch.tensor(starts))]


def _costs(cut: str, segments: Sequence[Segment], inputs: Sequence[Tensor]) -> list[float]:
    """The cost of each segment, by the measure that blocks shall be equal in."""
    if cut == "parameters":
        return [float(sum(p.numel() for p in segment.module.parameters())) for segment in segments]
    measure = flops if cut == "flops" else seconds
    pairs = zip(segments, inputs, strict=True)
    return [measure(segment.module, x, input_gradient=i > 0) for i, (segment, x) in enumerate(pairs)]


def cut_into_blocks(
    strategy: str, model: nn.Module, segments: Sequence[Segment], starts: Sequence[int]
) -> list[nn.Sequential]:
    """The blocks that begin at these segments.

    Raises UsageError if two blocks share a tensor, or if one has nothing to train.
    """
    modules = [segment.module for segment in segments]
    ends = [*starts[1:], len(segments)]
    blocks = [nn.Sequential(*modules[start:end]) for start, end in zip(starts, ends, strict=True)]
    check_ties(blocks, model)
    for number, (block, start) in enumerate(zip(blocks, starts, strict=True), 1):
        if not any(p.requires_grad for p in block.parameters()):
            raise UsageError(
                f"{strategy}: block {number}, from layer {segments[start].name} on, has nothing to train; cut "
                "elsewhere, use fewer blocks, or set requires_grad on a parameter of it"
            )
    return blocks
