"""The ledger keeps its books, and the formulas hold."""

from __future__ import annotations

import threading

import pytest

from thinwire.comm.ledger import Ledger, all_gather_bytes, all_reduce_bytes, broadcast


def book(ledger: Ledger, wire_bytes: int = 6) -> None:
    ledger.book("world", "all_reduce", ranks=4, payload_bytes=4, wire_bytes=wire_bytes, between_bytes=0, seconds=0.5)


def test_totals_add_up_by_key() -> None:
    ledger = Ledger()
    book(ledger)
    book(ledger)
    with ledger.purpose("eval"):
        book(ledger, 1)
    rows = ledger.rows()
    assert [(r["purpose"], r["calls"], r["wire_bytes"], r["seconds"]) for r in rows] == [
        ("eval", 1, 1, 0.5),
        ("train", 2, 12, 1.0),
    ]
    assert ledger.wire_bytes == 13


def test_rows_survive_saving_and_loading() -> None:
    ledger, other = Ledger(), Ledger()
    book(ledger)
    other.load_rows(ledger.rows())
    book(ledger)
    book(other)
    assert ledger.rows() == other.rows()


def test_each_thread_has_its_own_purpose() -> None:
    ledger = Ledger()
    with ledger.purpose("eval"):
        thread = threading.Thread(target=book, args=(ledger,))
        thread.start()
        thread.join()
    assert ledger.rows()[0]["purpose"] == "train"


def test_purposes_nest_and_end_with_their_block() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="inner"), ledger.purpose("eval"), ledger.purpose("sync"):
        raise ValueError("inner")
    book(ledger)
    assert ledger.rows()[0]["purpose"] == "train"


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_ring_all_reduce(ranks: int, factor: float) -> None:
    assert all_reduce_bytes(1000, ranks) == 1000 * factor


def test_all_gather() -> None:
    assert [all_gather_bytes(10, n) for n in (1, 2, 5)] == [0, 10, 40]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_broadcast_reaches_every_other_rank_once(ranks: int, backend: str) -> None:
    for root in range(ranks):
        assert sum(sum(broadcast(1, ranks, rank, root, backend).values()) for rank in range(ranks)) == ranks - 1


def test_gloo_broadcasts_along_a_binomial_tree() -> None:
    assert [sum(broadcast(1, 4, rank, 0, "gloo").values()) for rank in range(4)] == [2, 1, 0, 0]
    assert [sum(broadcast(1, 4, rank, 2, "gloo").values()) for rank in range(4)] == [0, 0, 2, 1]
    assert [sum(broadcast(1, 4, rank, 0, "nccl").values()) for rank in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([(0.0, 4.0), (1.0, 6.0), (7.0, 8.0)], 7.0),
        ([(0.0, 10.0), (5.0, 6.0)], 10.0),  # the first is waited for last
        ([(1.0, 2.0), (2.0, 3.0)], 2.0),
        ([(0.0, 9.0), (1.0, 2.0), (3.0, 4.0), (8.0, 11.0)], 11.0),
    ],
)
def test_time_in_which_several_operations_are_under_way_counts_once(
    times: list[tuple[float, float]], seconds: float
) -> None:
    ledger = Ledger()
    line, other = (
        ledger.book("world", op, ranks=2, payload_bytes=1, wire_bytes=1, between_bytes=0) for op in ("send", "recv")
    )
    begins = [(begin, ledger.began) for begin, _ in times]
    ends = [(end, ledger.ended) for _, end in times]
    for at, happened in sorted(begins + ends, key=lambda event: event[0]):
        happened(line, at)
    ledger.began(other, 3.0)
    ledger.ended(other, 4.5)
    assert {row["op"]: row["seconds"] for row in ledger.rows()} == {"send": seconds, "recv": 1.5}
