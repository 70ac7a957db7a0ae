"""Every unit is assigned to one rank, in proportion to shares."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.surgery.unit_assignment import assign_units, split_by_shares


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    number=st.integers(0, 5),
)
def test_every_unit_is_assigned_to_one_rank(sizes: list[int], shares: list[float], number: int) -> None:
    assigned = assign_units(sizes, shares, 0, number)
    assert assigned[0][0].equal(assign_units(sizes, shares, 0, number)[0][0])
    for axis, size in enumerate(sizes):
        held = [unit_indices[axis] for unit_indices in assigned]
        assert all(len(units) for units in held)
        assert all(units.equal(units.sort().values) for units in held)
        everything = torch.cat(held).sort().values
        if size >= len(shares):
            assert everything.equal(torch.arange(size))
        else:
            assert everything.unique().equal(torch.arange(size))


def test_assignments_differ_between_rounds_and_axes() -> None:
    (a, b), (c, _) = assign_units([64, 64], [1, 1], 0, 0)[0], assign_units([64, 64], [1, 1], 0, 1)[0]
    assert not a.equal(b)
    assert not a.equal(c)


@given(st.integers(1, 60), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_parts_are_whole_and_near_their_shares(size: int, shares: list[float]) -> None:
    size = max(size, len(shares))
    parts = split_by_shares(size, shares)
    assert sum(parts) == size
    assert min(parts) >= 1
    if all(size * share / sum(shares) >= 1 for share in shares):
        order = sorted(range(len(shares)), key=lambda i: shares[i])
        assert all(parts[i] <= parts[j] + 1 for i, j in itertools.pairwise(order))
