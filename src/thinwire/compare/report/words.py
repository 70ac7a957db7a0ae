"""Words and names, safe to put into the page."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from thinwire.compare.report.marks import colour, dash
from thinwire.compare.results import Entry


def spec_of(i: int, entry: Entry) -> str:
    """A strategy with the ring of its colour."""
    ring = {"solid": "solid", "dot": "dotted"}.get(dash(i), "dashed")
    badge = f'<b class="badge" style="border:2px {ring} {colour(i)}">{i + 1}</b>'
    return f'{badge}<span class="spec">{breakable(entry.spec)}</span>'


def breakable(text: str) -> str:
    """Text that may wrap after brackets, commas and the equals signs before words."""
    return re.sub(r"([(,]|=(?=[a-z]))(?=\S)", r"\1<wbr>", escape(text))


def code(text: Any) -> str:
    """Text as code."""
    return f"<code>{escape(str(text))}</code>"


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{escape(str(number))} {noun}{'s' * (number != 1)}"


def listed(values: list[int]) -> str:
    """Numbers as a list in words.

    >>> listed([0, 1, 2])
    '0, 1 and 2'
    """
    words = [escape(str(value)) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
