"""Which part of an operation's bytes leaves the node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from thinwire.comm.base import Comm
from thinwire.comm.world import host_id, place
from thinwire.errors import UsageError


@given(st.integers(1, 40), st.data())
def test_ranks_are_placed_in_order_and_evenly(ranks: int, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, ranks))
    placed = place(ranks, nodes)
    sizes = [placed.count(node) for node in range(nodes)]
    assert placed == sorted(placed)
    assert len(placed) == ranks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("nodes", [0, 4])
def test_nodes_without_ranks_are_refused(nodes: int) -> None:
    with pytest.raises(UsageError, match=f"{nodes} nodes for 3 ranks; possible: 1 to 3"):
        place(3, nodes)


def test_a_host_knows_itself() -> None:
    assert host_id() == host_id() > 0


def sent(comm: Comm) -> dict[str, tuple[int, int]]:
    data = torch.zeros(120, dtype=torch.uint8)
    comm.sum(data)
    comm.all_gather(data)
    comm.broadcast(data, root=0)
    comm.all_to_all([data[: 10 * (to + 1)] for to in range(comm.size)], [data[: 10 * (comm.rank + 1)]] * comm.size)
    return {row["op"]: (row["wire_bytes"], row["between_bytes"]) for row in comm.ledger.rows()}


def total(ranks: int, nodes: int) -> dict[str, tuple[int, int]]:
    found = tw.simulate(sent, ranks=ranks, nodes=nodes)
    return {op: (sum(one[op][0] for one in found), sum(one[op][1] for one in found)) for op in found[0]}


def test_bytes_between_two_nodes_of_two_ranks() -> None:
    """A ring crosses twice, of four hops; a tree from rank 0 (to 1 and 2, then 1 to 3) twice, of three."""
    assert total(4, 2) == {
        "all_reduce": (4 * 180, 2 * 180),
        "all_gather": (4 * 360, 2 * 360),
        "broadcast": (3 * 120, 2 * 120),
        "all_to_all": (90 + 80 + 70 + 60, (30 + 40) * 2 + (10 + 20) * 2),
    }


@pytest.mark.parametrize("ranks", [2, 5])
def test_on_one_node_nothing_leaves_it_and_with_one_rank_a_node_everything_does(ranks: int) -> None:
    assert all(between == 0 for _, between in total(ranks, 1).values())
    assert all(between == wire > 0 for wire, between in total(ranks, ranks).values())


def parts(comm: Comm) -> Any:
    inside = comm.split([[0, 1], [2, 3]], "node")
    across = comm.split([[0, 2], [1, 3]], "wan")
    inside.sum(torch.zeros(100, dtype=torch.uint8))
    across.sum(torch.zeros(100, dtype=torch.uint8))
    return inside.nodes, across.nodes, {r["link"]: r["between_bytes"] for r in comm.ledger.rows()}


def test_parts_of_a_world_know_their_nodes() -> None:
    for rank, (inside, across, between) in enumerate(tw.simulate(parts, ranks=4, nodes=2)):
        assert inside == ((0, 0), (0, 0), (1, 1), (1, 1))[rank]
        assert across == (0, 1)
        assert between == {"node": 0, "wan": 100}
