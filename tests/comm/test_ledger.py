"""Totals add up by key, under the purpose of the thread, and overlapping operations count their time once."""

from __future__ import annotations

import threading

import pytest

from thinwire.comm.ledger import Ledger


def book(ledger: Ledger, wire_bytes: int = 6) -> None:
    total = ledger.book("world", "all_reduce", ranks=4, payload_bytes=4, wire_bytes=wire_bytes, between_bytes=0)
    ledger.start_clock(total, total.clock_at + 1)
    ledger.stop_clock(total, total.clock_at + 0.5)


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
    begins = [(begin, ledger.start_clock) for begin, _ in times]
    ends = [(end, ledger.stop_clock) for _, end in times]
    for at, happened in sorted(begins + ends, key=lambda event: event[0]):
        happened(line, at)
    ledger.start_clock(other, 3.0)
    ledger.stop_clock(other, 4.5)
    assert {row["op"]: row["seconds"] for row in ledger.rows()} == {"send": seconds, "recv": 1.5}
