"""put_slice undoes take_slice."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.surgery.slices import put_slice, take_slice


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_slice_put_back_changes_nothing_and_nothing_else(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape).float()
    index = tuple(
        data.draw(st.none() | st.sets(st.integers(0, n - 1), min_size=1).map(lambda s: torch.tensor(sorted(s))))
        for n in shape
    )
    part = take_slice(tensor, index)
    other = torch.full_like(tensor, -1)
    put_slice(other, index, part)
    kept = other >= 0
    assert torch.equal(other[kept], tensor[kept])
    assert kept.sum() == part.numel()
    put_slice(tensor, index, part)
    assert torch.equal(tensor, torch.arange(math.prod(shape)).view(shape))
