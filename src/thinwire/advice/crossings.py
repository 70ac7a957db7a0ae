"""Which strategy is fastest at which speed of the link: ranges of speeds, and a sentence that names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from thinwire.advice.ranking import SAME
from thinwire.netlab.link import Link
from thinwire.plan.measured import REFERENCE

PRECISION = 1.05  # of a speed at which the fastest changes

Times = Callable[[float, Collection[str]], Mapping[str, float]]  # of some strategies at a speed


class Range(NamedTuple):
    """Speeds at which a strategy is fastest, or as fast as any other: times that differ by less than 2 % are the same.

    The first range begins, and the last one ends, where the curves do.
    """

    strategy: str
    from_mbit: float
    to_mbit: float
    is_alone: bool  # whether it is faster than all others somewhere in the range


def fastest_ranges(times: Times, rates: Sequence[float], specs: Sequence[str]) -> list[Range]:
    """The ranges from the slowest to the fastest of the rates; between two of them, speeds are found by bisection.

    Going up, a strategy stays the fastest until another one beats it. data_parallel is exact, so where it is as fast
    as any it is named.
    """
    if not specs:
        return []
    known = {rate: times(rate, specs) for rate in rates}
    current, begin = winner(known[rates[0]]), rates[0]
    found: list[tuple[str, float, float]] = []
    for low, high in pairwise(rates):
        quickest = SAME * min(known[low].values())
        possible = {spec for spec in specs if known[high][spec] <= quickest} | {current}  # times fall with the rate
        while winner(known[high], current) != current:
            below, above = low, high
            while above > PRECISION * below:
                middle = math.sqrt(below * above)
                if winner(times(middle, possible), current) == current:
                    below = middle
                else:
                    above = middle
            change = math.sqrt(below * above)
            found.append((current, begin, change))
            following = winner(known[high] if above == high else times(above, possible), current)
            current, begin, low = following, change, above
    found.append((current, begin, rates[-1]))
    return [Range(*one, is_alone=_leads(one, known)) for one in found]


def winner(times: Mapping[str, float], current: str | None = None) -> str:
    """The fastest strategy; of those that are as fast, data_parallel, or the current one.

    >>> winner({"diloco": 1.0, "local_sgd": 1.01}, "local_sgd")
    'local_sgd'
    """
    limit = SAME * min(times.values())
    for spec in (REFERENCE, current):
        if spec is not None and times.get(spec, math.inf) <= limit:
            return spec
    return min(times, key=lambda spec: times[spec])


def _leads(one: tuple[str, float, float], known: Mapping[float, Mapping[str, float]]) -> bool:
    """Whether a strategy is faster than all others somewhere in a range; one without a known point is taken to be."""
    spec, begin, end = one
    inside = [times for rate, times in known.items() if begin <= rate <= end]
    others = [[seconds for other, seconds in times.items() if other != spec] for times in inside]
    return not inside or any(
        SAME * times[spec] < min(rest, default=math.inf) for times, rest in zip(inside, others, strict=True)
    )


def sentence(ranges: Sequence[Range]) -> str:
    """The ranges in words.

    >>> slow, fast = Range("diloco", 1, 433, True), Range("data_parallel", 433, 1e5, False)
    >>> sentence([slow, fast])
    'Below 430 Mbit/s, diloco is fastest; from there on, data_parallel is as fast as any.'
    """
    if not ranges:
        return ""
    if len(ranges) == 1:
        only = ranges[0]
        return f"{_praised(only)} at every speed from {speed_text(only.from_mbit)} to {speed_text(only.to_mbit)}."
    first, *between, last = ranges
    parts = [f"Below {speed_text(first.to_mbit)}, {_praised(first)}"]
    parts += [f"from there to {speed_text(one.to_mbit)}, {_praised(one)}" for one in between]
    return "; ".join([*parts, f"from there on, {_praised(last)}"]) + "."


def _praised(one: Range) -> str:
    return f"{one.strategy} is {'fastest' if one.is_alone else 'as fast as any'}"


def speed_text(mbit: float) -> str:
    """A speed with two digits.

    >>> speed_text(1), speed_text(433), speed_text(8190), speed_text(100_000)
    ('1 Mbit/s', '430 Mbit/s', '8.2 Gbit/s', '100 Gbit/s')
    """
    rounded = float(f"{mbit:.2g}")
    return f"{rounded / 1e3:g} Gbit/s" if rounded >= 1e3 else f"{rounded:g} Mbit/s"


def link_text(link: Link) -> str:
    """A link for people.

    >>> link_text(Link(10_000, 5))
    '10 Gbit/s with 5 ms latency'
    """
    rate = f"{link.rate_mbit / 1e3:.4g} Gbit/s" if link.rate_mbit >= 1e3 else f"{link.rate_mbit:.4g} Mbit/s"
    return rate + (f" with {link.latency_ms:.3g} ms latency" if link.latency_ms >= 0.05 else "")
