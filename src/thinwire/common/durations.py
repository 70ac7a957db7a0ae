"""Durations as users write them: 90s, 5m, 1h30m."""

from __future__ import annotations

import re

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
MOST_SECONDS = 31_536_000  # a year
POSSIBLE = "give a number with a unit, as 90s, 5m, 2h or 1h30m; more than 0, up to 365d"


def parse_duration(text: str) -> float:
    """The seconds of a duration; ValueError for anything else.

    >>> parse_duration("90s"), parse_duration("1h30m"), parse_duration("0.5d")
    (90.0, 5400.0, 43200.0)
    """
    number = r"(\d+(?:\.\d+)?)"
    if not re.fullmatch(rf"(?:{number} *[dhms] *)+", text := text.strip().lower()):
        raise ValueError(f"{text!r} is no duration: {POSSIBLE}")
    parts = re.findall(rf"{number} *([dhms])", text)
    seconds = sum(float(count) * UNITS[unit] for count, unit in parts)
    units = [list(UNITS).index(unit) for _, unit in parts]
    if units != sorted(set(units)) or not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"{text!r} is not possible: {POSSIBLE}")
    return seconds


def checked_duration(text: str) -> str:
    """The duration as it was given; ValueError if it is none."""
    parse_duration(text)
    return text


def format_duration(seconds: float) -> str:
    """Seconds up to a minute, then minutes:seconds or hours:minutes:seconds.

    >>> format_duration(6), format_duration(1.5), format_duration(300), format_duration(7300)
    ('6 s', '1.5 s', '5:00', '2:01:40')
    """
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
