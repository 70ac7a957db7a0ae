"""Small tensors travel together: where they lie in their vector, and how few parts a message has."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.exchange.pieces import Run
from thinwire.exchange.shard_layout import ShardLayout
from thinwire.exchange.slice_routes import SMALL, SmallTensors, make_routes, small_tensors
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.slices import Slices, take_slice
from thinwire.surgery.unit_assignment import assign_units

RANKS = 3


@given(shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4), data=st.data())
def test_positions_are_where_the_elements_of_a_slice_lie(shapes: list[list[int]], data: st.DataObject) -> None:
    small = SmallTensors({str(i): shape for i, shape in enumerate(shapes)})
    vector = torch.arange(small.size)
    assert small.size % 16 == 0
    for name, view in small.views(vector).items():
        index = [
            data.draw(st.none() | st.sets(st.integers(0, n - 1), min_size=1).map(lambda s: torch.tensor(sorted(s))))
            for n in view.shape
        ]
        positions = small.positions(name, [None if i is None else i.numpy() for i in index])
        assert vector[torch.from_numpy(positions)].tolist() == take_slice(view, tuple(index)).flatten().tolist()


def test_a_message_has_a_run_for_each_dtype_and_its_indices_are_moved_in_one_copy() -> None:
    layers = [
        layer for _ in range(5) for layer in (nn.Conv2d(32, 32, 3, padding=1, bias=True), nn.BatchNorm2d(32), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3))
    slices = Slices(model, axes_of(model))
    layout = ShardLayout(slices, RANKS, {name: t.dtype for name, t in slices.tensors.items()})
    shapes = {name: layout.shard_shape(name, 1) for name, t in slices.tensors.items() if t.numel() <= SMALL}
    units = assign_units([axis.size for axis in slices.axes], [1.0] * RANKS, 0, 0)
    routes = make_routes(layout, units, 1, small_tensors(layout.dtypes, shapes), torch.device("cpu"))
    storages = set()
    for to, parts in enumerate(routes.to_slices):
        runs = [part for part in parts if isinstance(part, Run)]
        assert len(runs) == 2, "what units divide, and what all ranks have; rank 0 has the counters of batches"
        assert len(parts) - len(runs) == 5
        pieces = layout.pieces(units[to], 1)
        assert sum(part.num_bytes for part in parts) == sum(math.prod(p.shape) * p.dtype.itemsize for p in pieces)
        storages |= {i.untyped_storage().data_ptr() for part in parts for i in part.slice_index if i is not None}
    assert len(storages) == 1
