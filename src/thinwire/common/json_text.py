"""JSON from files and from other ranks: read with limits, so that bad text is a ValueError and nothing else."""

from __future__ import annotations

import json
from typing import Any

MOST_DIGITS = 19  # of a whole number: no count of ours has more, and sums of longer ones are no floats


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. ValueError if it is none, too deeply nested, or has a number of too many digits.

    >>> parse_json('{"steps": 3}'), parse_json(b"[0.5]")
    ({'steps': 3}, [0.5])
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits)} digits")
    return int(digits)
