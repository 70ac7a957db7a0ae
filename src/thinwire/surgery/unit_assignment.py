"""Which rank has which units: a random partition of each axis, the same on every rank without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.data import derive_seed
from thinwire.surgery.slices import UnitIndices


def assign_units(sizes: Sequence[int], shares: Sequence[float], *seeds: int) -> list[UnitIndices]:
    """Assign every unit of each axis to one rank at random, as a function of the seeds (the run's seed and the round).

    Ranks get numbers of units in proportion to their shares, at least one each. Where there are fewer units than ranks,
    some units are assigned to several.

    >>> [unit_indices[0].tolist() for unit_indices in assign_units([5], [1, 1], 0, 0)]
    [[1, 2, 4], [0, 3]]
    """
    assigned: list[UnitIndices] = [[] for _ in shares]
    for axis, size in enumerate(sizes):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(*seeds, axis)))
        if size < len(shares):
            order = order.repeat(-(-len(shares) // size))[: len(shares)]
        for unit_indices, units in zip(assigned, order.split(split_by_shares(len(order), shares)), strict=True):
            unit_indices.append(units.sort().values)
    return assigned


def split_by_shares(total: int, shares: Sequence[float]) -> list[int]:
    """Split a number into whole parts in proportion to shares, each at least 1, by largest remainder.

    >>> split_by_shares(10, [1, 1, 1]), split_by_shares(10, [8, 1, 1]), split_by_shares(4, [100, 1, 1])
    ([4, 3, 3], [8, 1, 1], [2, 1, 1])
    """
    spare, sum_of_shares = total - len(shares), sum(shares)
    wanted = [max(0.0, total * share / sum_of_shares - 1) for share in shares]
    scale = spare / sum(wanted) if sum(wanted) else 0.0
    exact = [w * scale for w in wanted]
    parts = [int(x) for x in exact]
    for i in sorted(range(len(shares)), key=lambda i: parts[i] - exact[i])[: spare - sum(parts)]:
        parts[i] += 1
    return [1 + part for part in parts]
