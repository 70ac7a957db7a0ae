"""Durations as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.common.durations import MOST_SECONDS, UNITS, format_duration, parse_duration


@given(st.lists(st.integers(0, 300), min_size=4, max_size=4).filter(any))
def test_units_add_up(counts: list[int]) -> None:
    seconds = sum(count * unit for count, unit in zip(counts, UNITS.values(), strict=True))
    text = "".join(f"{count}{unit}" for count, unit in zip(counts, UNITS, strict=True) if count)
    assert parse_duration(text) == parse_duration(f" {text.upper()} ") == seconds


@given(st.text(max_size=8))
def test_other_text_is_refused_with_what_is_possible(text: str) -> None:
    message = ""
    try:
        assert 0 < parse_duration(text) <= MOST_SECONDS
    except ValueError as error:
        message = str(error)
    assert not message or "give a number with a unit, as 90s, 5m, 2h or 1h30m" in message


@pytest.mark.parametrize(
    "text", ["5", "", "m", "5 minutes", "-5m", "0s", "5m1h", "5m5m", "1e3s", "infs", "366d", "٣m x"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"no duration|not possible"):
        parse_duration(text)


def test_durations_as_text() -> None:
    assert [format_duration(s) for s in (0.5, 9.96, 40.2, 59.7, 61, 3600)] == [
        "0.5 s", "10.0 s", "40 s", "1:00", "1:01", "1:00:00",
    ]  # fmt: skip
