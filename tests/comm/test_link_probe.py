"""Rates and latencies between ranks: the same on every rank, booked and bounded. tests/advice has a shaped link."""

from __future__ import annotations

import itertools
from typing import Any

import thinwire as tw
from tests.worlds import World, worlds
from thinwire.comm import link_probe
from thinwire.comm.base import Comm
from thinwire.comm.link_probe import LARGEST_BYTES, PAIR_BYTES, Transfer


def measure(comm: Comm, seconds: float) -> Any:
    latency = link_probe.measure_latency(comm, 0, comm.size - 1)
    matrix, ring = link_probe.measure_pairs(comm, seconds), link_probe.measure_ring(comm, seconds)
    return latency, matrix, ring, comm.ledger.rows()


@worlds(threads=[2, 4], processes=[3])
def test_every_rank_gets_the_same_matrix_and_ring(world: World, ranks: int) -> None:
    found = world(measure, ranks, 30.0)  # it takes less: the bytes of each pair are bounded
    for latency, matrix, ring, rows in found:
        assert (latency, matrix, ring) == found[0][:3]
        assert latency > 0
        assert all((matrix[a][b] is None) == (a == b) for a in range(ranks) for b in range(ranks))
        assert all(link is None or link.rate_mbit > 0 for row in matrix for link in row)
        assert all(matrix[a][b].latency_ms == matrix[b][a].latency_ms for a in range(ranks) for b in range(a))
        assert ring.rate_mbit > 0
        assert {row["purpose"] for row in rows} == {"start"}
        assert sum(row["wire_bytes"] for row in rows) < PAIR_BYTES * ranks + 100_000


def test_alone_there_is_no_link() -> None:
    def alone(comm: Comm) -> Any:
        return link_probe.measure_pairs(comm, 0.1), link_probe.measure_ring(comm, 0.1)

    assert tw.simulate(alone, ranks=1) == [([[None]], None)]


def test_without_time_nothing_is_sent_but_the_answer() -> None:
    for matrix in tw.simulate(lambda comm: link_probe.measure_pairs(comm, -1.0), ranks=3):
        assert matrix == [[None] * 3] * 3


def test_one_rank_of_each_node_is_measured() -> None:
    def count(comm: Comm) -> tuple[int, int]:
        matrix = link_probe.measure_pairs(comm, 0.1)
        sent = sum(row["payload_bytes"] for row in comm.ledger.rows() if row["op"] == "send")
        return len(matrix), sent

    found = tw.simulate(count, ranks=4, nodes=2)
    assert [size for size, _ in found] == [2] * 4
    assert [sent > 0 for _, sent in found] == [True, False, True, False]


def test_of_many_ranks_some_are_measured() -> None:
    assert link_probe.probed_ranks([*range(100)]) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert link_probe.probed_ranks([0, 1, 1, 2]) == [0, 1, 3]


def test_pairs_are_measured_one_after_the_other() -> None:
    """A pair needs a rank of the pair before it, so it cannot start while that one is being measured."""
    for count in (2, 3, 8):
        pairs = link_probe._in_order(range(count))
        assert sorted(pairs) == sorted((a, b) for a in range(count) for b in range(count) if a != b)
        assert all(set(one) & set(other) for one, other in itertools.pairwise(pairs))


def test_transfers_grow_until_one_takes_long_enough_and_no_further() -> None:
    for rate in (1e4, 1e6, 1e9, 1e12):  # bytes a second
        size, total, longest = link_probe.FIRST_BYTES, 0, 0.0
        while size:
            total, longest = total + size + size // 4, size / rate
            size = Transfer(size, longest).next_bytes(0.1)
        assert total <= PAIR_BYTES
        assert longest >= 0.05 or total >= LARGEST_BYTES
