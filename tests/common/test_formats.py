"""Numbers as text, at the places where units change."""

from __future__ import annotations

import pytest

from thinwire.common.formats import format_bytes, format_count, format_metric, format_rate, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9990, "9.99 kB"), (10_000, "10.0 kB"), (99_900, "99.9 kB"),
     (100_000, "100 kB"), (1e6, "1.00 MB"), (1e9, "1.00 GB"), (1e12, "1.00 TB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text
    assert format_count(value) == text.removesuffix("B").strip()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0004, "0 ms"), (0.25, "250 ms"), (1, "1.0 s"), (59.94, "59.9 s"), (60, "1:00"), (61.4, "1:01"),
     (3599, "59:59"), (3600, "1:00:00"), (90_061, "25:01:01")],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("mbit", "text"), [(0.5, "0.5"), (9.784, "9.78"), (100, "100"), (999, "999"), (1000, "1,000")])
def test_rates(mbit: float, text: str) -> None:
    assert format_rate(mbit) == text


def test_metrics() -> None:
    assert format_metric(97.0, "accuracy") == "97.00 %"
    assert format_metric(97.0, "loss") == "97.0000"
