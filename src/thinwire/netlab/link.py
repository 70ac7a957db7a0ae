"""A link's rate and latency, and their text: "100mbit,10ms"."""

from __future__ import annotations

import re
from typing import NamedTuple

from thinwire.errors import UsageError

RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}  # in Mbit/s
TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}  # in ms
SLOWEST_MBIT, FASTEST_MBIT, LONGEST_MS = 1.0, 10_000.0, 2_000.0


class Link(NamedTuple):
    """The link of every host: its rate, in both directions at once, and the latency from one host to another."""

    rate_mbit: float
    latency_ms: float = 0.0  # one way; a round trip takes twice as long

    def __str__(self) -> str:
        rate = f"{self.rate_mbit / 1e3:g}gbit" if self.rate_mbit >= 1e3 else f"{self.rate_mbit:g}mbit"
        return rate + (f",{self.latency_ms:g}ms" if self.latency_ms else "")


def parse_link(text: str, slowest_mbit: float = SLOWEST_MBIT, fastest_mbit: float = FASTEST_MBIT) -> Link:
    """A link from its text: a rate, in both directions, and perhaps a latency.

    >>> parse_link("1gbit"), str(parse_link("2.5mbit,500us")), str(parse_link("1gbit"))
    (Link(rate_mbit=1000.0, latency_ms=0.0), '2.5mbit,0.5ms', '1gbit')
    """
    match = re.fullmatch(r"([\d.]+) ?([kmg]bit)(?:/s)?(?:, ?([\d.]+) ?(us|ms|s))?", text.strip().lower())
    try:
        if match is None:
            raise ValueError
        rate, unit, delay, delay_unit = match.groups()
        link = Link(round(float(rate) * RATES[unit], 9), float(delay) * TIMES[delay_unit] if delay else 0.0)
    except ValueError:
        raise UsageError(
            f"link '{text}': expected a rate in kbit, mbit or gbit and perhaps a latency in us, ms or s; "
            "try 100mbit, or 1gbit,10ms (10 ms each way)"
        ) from None
    if not slowest_mbit <= link.rate_mbit <= fastest_mbit:
        possible = f"{slowest_mbit:g}mbit to {fastest_mbit / 1e3:g}gbit"
        raise UsageError(f"link '{text}': possible rates are {possible}, in both directions; try 100mbit")
    if link.latency_ms > LONGEST_MS:
        raise UsageError(f"link '{text}': possible latencies are 0ms to 2s; try 100mbit,10ms")
    return link
