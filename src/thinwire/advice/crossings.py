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

    Where a neighbour is as fast in all of a range, the range is the neighbour's. data_parallel is exact, so from where
    it is as fast as any up to the fastest rate, it is named.
    """
    if not specs:
        return []
    known = {rate: times(rate, specs) for rate in rates}
    found = [_Part(fastest(known[rates[0]]), rates[0], rates[-1])]
    for low, high in pairwise(rates):
        for spec, rate in _changes(times, (low, known[low]), (high, known[high])):
            found = [*found[:-1], found[-1]._replace(end=rate), _Part(spec, rate, rates[-1])]
    found = _with_reference(_without_ties(found, times, rates), times, known)
    return [Range(*one, is_alone=_leads(one, known)) for one in found]


class _Part(NamedTuple):
    spec: str
    begin: float
    end: float


def fastest(times: Mapping[str, float]) -> str:
    """The strategy that takes the shortest time."""
    return min(times, key=lambda spec: times[spec])


def _changes(
    times: Times, low: tuple[float, Mapping[str, float]], high: tuple[float, Mapping[str, float]]
) -> list[tuple[str, float]]:
    """The speeds between two at which another strategy becomes the fastest, each with that strategy."""
    before, after = fastest(low[1]), fastest(high[1])
    if before == after:
        return []
    middle = math.sqrt(low[0] * high[0])
    if high[0] <= PRECISION * low[0]:
        return [(after, middle)]
    shortest = min(low[1].values())  # times fall with the rate: what is slower at the upper end is slower everywhere
    possible = {spec for spec, seconds in high[1].items() if seconds <= shortest} | {before, after}
    between = middle, times(middle, possible)
    return [*_changes(times, low, between), *_changes(times, between, high)]


def _without_ties(found: list[_Part], times: Times, rates: Sequence[float]) -> list[_Part]:
    """The parts without those in which a neighbour is as fast, the shortest first."""
    for one in sorted(found, key=lambda part: part.end / part.begin):
        at = found.index(one)
        for other in sorted((at - 1, at + 1), key=lambda i: i in range(len(found)) and found[i].spec != REFERENCE):
            if other not in range(len(found)):
                continue
            pair = {one.spec, found[other].spec}
            inside = [
                times(rate, pair) for rate in (one.begin, *(r for r in rates if one.begin < r < one.end), one.end)
            ]
            if all(there[found[other].spec] <= SAME * there[one.spec] for there in inside):
                first, last = min(at, other), max(at, other)
                merged = _Part(found[other].spec, found[first].begin, found[last].end)
                return _without_ties([*found[:first], merged, *found[last + 1 :]], times, rates)
    return found


def _with_reference(found: list[_Part], times: Times, known: Mapping[float, Mapping[str, float]]) -> list[_Part]:
    """The parts, with data_parallel from where it is as fast as any up to the fastest rate."""
    rates = list(known)
    tied = [_is_tied(known[rate]) for rate in rates]
    if found[-1].spec == REFERENCE or not tied[-1]:
        return found
    first = next((i + 1 for i in reversed(range(len(rates))) if not tied[i]), 0)
    below, above = rates[max(0, first - 1)], rates[first]
    while above > PRECISION * below:
        middle = math.sqrt(below * above)
        below, above = (below, middle) if _is_tied(times(middle, known[rates[-1]].keys())) else (middle, above)
    begin = math.sqrt(below * above)
    kept = [one._replace(end=min(one.end, begin)) for one in found if one.begin < begin]
    return [*kept, _Part(REFERENCE, begin, rates[-1])]


def _is_tied(times: Mapping[str, float]) -> bool:
    """Whether data_parallel is as fast as any."""
    return times.get(REFERENCE, math.inf) <= SAME * min(times.values())


def _leads(one: _Part, known: Mapping[float, Mapping[str, float]]) -> bool:
    """Whether a strategy is faster than all others somewhere in a range; one without a known point is taken to be."""
    inside = [times for rate, times in known.items() if one.begin <= rate <= one.end]
    others = [min((t for other, t in times.items() if other != one.spec), default=math.inf) for times in inside]
    return not inside or any(SAME * times[one.spec] < rest for times, rest in zip(inside, others, strict=True))


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
