"""Names and numbers as text for the page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from thinwire.compare.report.style import strategy_colour, strategy_dash
from thinwire.compare.results import Entry


@dataclass(frozen=True)
class StrategyName:
    """A strategy as the page names it: its number in a ring of its colour, and its spec."""

    index: int
    spec: str
    border: str  # of the ring, in CSS


def strategy_name(i: int, entry: Entry) -> StrategyName:
    """The name of a strategy on the page."""
    return name_of(i, entry.name)


def name_of(i: int, spec: str) -> StrategyName:
    """The name of the strategy with this number and spec."""
    ring = {"solid": "solid", "dot": "dotted"}.get(strategy_dash(i), "dashed")
    return StrategyName(i, spec, f"2px {ring} {strategy_colour(i)}")


def split_at_breaks(text: str) -> list[str]:
    """The pieces of a spec between which a line may break: after brackets, commas, and equals signs before words.

    >>> split_at_breaks("data_parallel(reducer=topk(ratio=0.01))")
    ['data_parallel(', 'reducer=', 'topk(', 'ratio=0.01))']
    """
    return re.split(r"(?<=[(,])(?=\S)|(?<==)(?=[a-z])", text)


def pluralize(number: Any, noun: str) -> str:
    """A number of things.

    >>> pluralize(1, "rank"), pluralize(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def join_with_and(values: list[int]) -> str:
    """Numbers as a list in words.

    >>> join_with_and([0, 1, 2])
    '0, 1 and 2'
    """
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
