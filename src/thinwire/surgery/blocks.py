"""Where the blocks of a model begin: at named layers or at equal costs, and never between uses of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from thinwire.common.tensors import named_tensors
from thinwire.errors import UsageError

MAX_LISTED = 12  # names in a message


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


def balanced_starts(costs: Sequence[float], num_blocks: int) -> list[int]:
    """The segments at which blocks begin, given the cost of each segment.

    The cost of the dearest block is the least possible; of all such ways, the one with the least Σ cost² is taken.

    >>> balanced_starts([1, 1, 1, 3], 2)
    [0, 3]
    """
    n = len(costs)
    cumulative = [0.0]
    for cost in costs:
        cumulative.append(cumulative[-1] + cost)

    def cost_of(begin: int, end: int) -> float:
        return cumulative[end] - cumulative[begin]

    # best[k, end]: k blocks up to segment `end`; the dearest one's cost, Σ cost², and where they begin
    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, 0.0, [])}
    for k in range(1, num_blocks + 1):
        for end in range(k, n - (num_blocks - k) + 1):
            ways = [
                (
                    max(best[k - 1, begin][0], cost_of(begin, end)),
                    best[k - 1, begin][1] + cost_of(begin, end) ** 2,
                    begin,
                )
                for begin in range(k - 1, end)
                if (k - 1, begin) in best
            ]
            dearest, squares, begin = min(ways)
            best[k, end] = dearest, squares, [*best[k - 1, begin][2], begin]
    return best[num_blocks, n][2]


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
