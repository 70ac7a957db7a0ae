"""The formulas of wire bytes."""

from __future__ import annotations

import pytest

from thinwire.comm.wire_bytes import all_gather_bytes, all_reduce_bytes, broadcast_sends


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_ring_all_reduce(ranks: int, factor: float) -> None:
    assert all_reduce_bytes(1000, ranks) == 1000 * factor


def test_all_gather() -> None:
    assert [all_gather_bytes(10, n) for n in (1, 2, 5)] == [0, 10, 40]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_broadcast_reaches_every_other_rank_once(ranks: int, backend: str) -> None:
    for root in range(ranks):
        assert sum(sum(broadcast_sends(1, ranks, rank, root, backend).values()) for rank in range(ranks)) == ranks - 1


def test_gloo_broadcasts_along_a_binomial_tree() -> None:
    assert [sum(broadcast_sends(1, 4, rank, 0, "gloo").values()) for rank in range(4)] == [2, 1, 0, 0]
    assert [sum(broadcast_sends(1, 4, rank, 2, "gloo").values()) for rank in range(4)] == [0, 0, 2, 1]
    assert [sum(broadcast_sends(1, 4, rank, 0, "nccl").values()) for rank in range(4)] == [1, 1, 1, 0]
