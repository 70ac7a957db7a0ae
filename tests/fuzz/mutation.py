"""Mutations of valid examples: of text, of bytes, of JSON values; and values that have often broken programs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NASTY_TEXT = [
    "",
    " ",
    "\0",
    "\n",
    "\x7f",
    "\x1b[31m",
    "'",
    '"',
    "\\",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    "=",
    ":",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "~",
    "$HOME",
    "%s",
    "{0}",
    "{{7*7}}",
    "<script>alert(1)</script>",
    "</script><b>",
    '"><img src=x>',
    "javascript:alert(1)",
    "\u202e",
    "\u2028",
    "\ufeff",
    "\ud800",
    "é",
    "日本",
    "🦀",
    "ﬁ",
    "²",
    "٣",
    "A" * 300,
    "-",
    "--",
    "#",
    "__import__('os').system('true')",
    "fuzz_trap:run",
    "antigravity:x",
    "os:system",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "None",
    "True",
    "lambda: 0",
    "__class__",
    "x.y",
    "**k",
    "*a",
    ";",
    "0x" + "f" * 5000,
    "9" * 5000,
    "1_0",
    "0o7",
    "1e5",
    "-0",
]
NASTY_NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e308,
    -1.5,
    math.nan,
    math.inf,
    -math.inf,
]


def text(rng: Random, example: str, words: Sequence[str] = ()) -> str:
    """A text like another one, with a few changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 6))):
        i, j = sorted((rng.randint(0, len(example)), rng.randint(0, len(example))))
        change = rng.randrange(7)
        if change == 0:
            example = example[:i] + rng.choice(NASTY_TEXT) + example[i:]
        elif change == 1:
            example = example[:i] + example[j:]
        elif change == 2:
            example = example[:i] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x300)))) + example[i + 1 :]
        elif change == 3 and words:
            example = example[:i] + rng.choice(words) + example[j:]
        elif change == 4:
            example = example[:j] + example[i:j] * rng.choice((1, 2, 50)) + example[j:]
        elif change == 5:
            example = example[:i] + rng.choice(NASTY_TEXT) + example[j:]
        else:
            example = example[:i] + str(rng.choice(NASTY_NUMBERS[:-4])) + example[j:]
        example = example[:20_000]
    return example


def octets(rng: Random, example: bytes) -> bytes:
    """Bytes like others: flipped, cut off, repeated, with large numbers in them."""
    data = bytearray(example)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        i, j = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
        change = rng.randrange(6)
        if change == 0 and data:
            data[min(i, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif change == 1:
            del data[i:]
        elif change == 2:
            data[i:i] = rng.randbytes(rng.choice((1, 4, 100)))
        elif change == 3:
            del data[i:j]
        elif change == 4:
            data[i : i + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", (2**40).to_bytes(8, "little")))
        else:
            data[: min(8, len(data))] = rng.randbytes(min(8, len(data)))
    return bytes(data)


def value(rng: Random, depth: int = 2) -> Any:
    """Any JSON value."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 2:
        return rng.choice(NASTY_NUMBERS)
    if kind < 4:
        return rng.choice(NASTY_TEXT)
    if kind < 6:
        return rng.choice((None, True, False))
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(NASTY_TEXT): value(rng, depth - 1) for _ in range(rng.randrange(3))}
    return nested(rng.choice((20, 150)))


def nested(depth: int) -> Any:
    """A list in a list in a list …"""
    result: Any = []
    for _ in range(depth):
        result = [result]
    return result


def places(tree: Any) -> list[tuple[Any, Any]]:
    """All places in a JSON value, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        one = todo.pop()
        keys: Any = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        todo += [one[key] for key in keys]
    return found


def json_value(rng: Random, example: Any, make: Callable[[Random], Any] = value) -> Any:
    """A JSON value like another one: fields changed, left out, renamed, swapped, or of another type."""
    tree = copy.deepcopy(example)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        found = places(tree)
        if not found or rng.random() < 0.02:
            return make(rng)
        container, key = rng.choice(found)
        change = rng.randrange(6)
        if change == 0 and isinstance(container, dict):
            del container[key]
        elif change == 1 and isinstance(container, dict):
            container[rng.choice(NASTY_TEXT)] = container.pop(key)
        elif change == 2:
            other, place = rng.choice(found)
            container[key] = copy.deepcopy(other[place])
        elif change == 3 and isinstance(container, list):
            container += [copy.deepcopy(container[key])] * rng.choice((1, 30))
        else:
            container[key] = make(rng)
    return tree
