"""Where the blocks of a model begin: at named layers or at equal costs, and never between uses of one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from torch import nn

from thinwire.common.tensors import named_tensors
from thinwire.errors import UsageError

MAX_LISTED = 12  # names in a message
NEARLY = 1.1  # times the least cost is little enough, if less is sent
ROUNDING = 1 + 1e-9  # by which sums of costs may be too large


def resolve_layer_names(names: Sequence[str], possible: Sequence[str]) -> list[str]:
    """The layers that blocks begin with; the name of a container stands for its first layer."""
    found = []
    for name in names:
        layer = next((p for p in possible if p == name or p.startswith(f"{name}.")), None)
        if layer is None:
            why = next(
                (f", which is inside {p}, and that is run as a whole" for p in possible if name.startswith(f"{p}.")), ""
            )
            raise UsageError(
                f"no block but the first can begin with layer {name!r}{why}; possible: {list_names(possible)}"
            )
        found.append(layer)
    return found


def list_names(names: Sequence[str]) -> str:
    """The first few of some names, for a message."""
    return ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")


class Way(NamedTuple):
    """A way to cut the first segments into blocks."""

    sent: float  # the sizes of what passes between its blocks
    squares: float  # Σ cost² of its blocks
    starts: list[int]


def balanced_starts(costs: Sequence[float], num_blocks: int, sizes: Sequence[float] | None = None) -> list[int]:
    """The segments at which blocks begin, given the cost of each segment.

    The cost of the dearest block is the least possible; of all such ways, the one with the least Σ cost² is taken.
    With the sizes of what segments take in, it is the way that passes on least among those whose dearest block and
    whose Σ cost² are at most a tenth larger than those of that way.

    >>> balanced_starts([1, 1, 1, 3], 2), balanced_starts([10, 10, 9, 9], 2, sizes=[3, 8, 8, 4])
    ([0, 3], [0, 2])
    >>> balanced_starts([10, 9, 1, 10], 2, sizes=[3, 8, 8, 4])
    [0, 3]
    """
    n = len(costs)
    cumulative = [0.0, *itertools.accumulate(costs)]
    dearest = [0.0] + [inf] * n  # of as many blocks as were looked at, up to each segment
    for k in range(1, num_blocks + 1):
        ends = range(k, n + 1)
        least = (
            min(max(dearest[begin], cumulative[end] - cumulative[begin]) for begin in range(k - 1, end)) for end in ends
        )
        dearest = [inf] * k + list(least)
    balanced = min(_ways(cumulative, [0.0] * n, num_blocks, dearest[n], inf))
    if sizes is None:
        return balanced.starts
    thinnest = min(_ways(cumulative, sizes, num_blocks, NEARLY * dearest[n], NEARLY * balanced.squares))
    return thinnest.starts if thinnest.sent < sum(sizes[i] for i in balanced.starts[1:]) else balanced.starts


def _ways(
    cumulative: Sequence[float], sizes: Sequence[float], num_blocks: int, dearest: float, squares: float
) -> list[Way]:
    """Of all ways whose blocks cost at most `dearest` and `squares`, those that no other one beats in both respects."""
    n = len(cumulative) - 1
    ways = {(0, 0): [Way(0.0, 0.0, [])]}  # by number of blocks, and where the last one ends
    for k in range(1, num_blocks + 1):
        left = num_blocks - k
        for end in range(k, n - left + 1):
            rest = cumulative[n] - cumulative[end]  # that other blocks must hold: alike, they would cost least
            if rest > left * dearest * ROUNDING:
                continue
            most_squares = squares * ROUNDING - (rest**2 / left if left else 0)
            longer = (
                Way(way.sent + (sizes[begin] if begin else 0), way.squares + cost**2, [*way.starts, begin])
                for begin in range(k - 1, end)
                if (cost := cumulative[end] - cumulative[begin]) <= dearest
                for way in ways.get((k - 1, begin), [])
            )
            kept: list[Way] = []
            for way in sorted(longer):
                if way.squares <= most_squares and (not kept or way.squares < kept[-1].squares):
                    kept.append(way)
            ways[k, end] = kept
    return ways[num_blocks, n]


def check_ties(blocks: Sequence[nn.Module], model: nn.Module) -> None:
    """Raise UsageError if two blocks share a tensor: each would train its own copy."""
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
                    f"{tied} are one tensor, of which blocks {first} and {number} would train different copies; "
                    "untie it (in Hugging Face's models with tie_word_embeddings=False), or cut so that one block "
                    "holds all of its uses"
                )
