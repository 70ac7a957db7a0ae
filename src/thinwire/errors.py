"""The errors that a user sees. Each message says what was given, what is possible and what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


MOST_LETTERS = 4000  # of an error's message; the middle of a longer one is left out


def one_line(text: str, keep: str = "") -> str:
    """A text that a terminal can show as it is: what is not printable is written as an escape.

    >>> one_line("a\\nb \\x1b[31m")
    'a\\\\nb \\\\x1b[31m'
    """
    if len(text) > MOST_LETTERS:
        text = f"{text[: MOST_LETTERS // 2]} … {text[-MOST_LETTERS // 4 :]}"
    if text.isprintable():
        return text
    escaped = (one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)
    return "".join(escaped)


class ThinwireError(Exception):
    """An error with a message for the user; the command line prints it without a traceback.

    Names and values in it may come from files of others, so nothing in it controls a terminal.
    """

    exit_code = 1
    keeps = "\n"  # what is not escaped in the message

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message), self.keeps))


class UsageError(ThinwireError, ValueError):
    """The request itself cannot be carried out: a wrong name, option, value or file."""

    exit_code = 2
    keeps = ""


class RunError(ThinwireError, RuntimeError):
    """The request was valid, but the run failed."""


class Stopped(RunError):
    """The run was ended by Ctrl-C or by a signal."""

    exit_code = 130


class PeerLost(RunError):
    """Another rank ended or stopped answering. The cause is on that rank, not on this one."""


def unknown(kind: str, given: str, possible: Iterable[str]) -> UsageError:
    """The error for a name that is not in a table, with the nearest name that is.

    >>> print(unknown("strategy", "data_paralel", ["data_parallel", "daso"]))
    unknown strategy 'data_paralel'; did you mean 'data_parallel'? Possible: daso, data_parallel
    """
    names = sorted(possible)
    near = difflib.get_close_matches(given.lower().replace("-", "_"), names, n=1)
    hint = f"did you mean '{near[0]}'? Possible" if near else "possible"
    return UsageError(f"unknown {kind} '{given}'; {hint}: {', '.join(names) or 'none'}")


def invalid(error: ValidationError, owner: str, prefix: str = "") -> UsageError:
    """The error for values that pydantic refused: each value, and what it should be, in one line.

    With a prefix, names are written as on the command line.
    """
    parts = []
    for first, found in groupby(error.errors(), key=lambda item: item["loc"][:1]):
        items = list(found)  # one for each type that the value may have
        elements = [[item] for item in items if isinstance((item["loc"] or [None])[-1], int)]  # of a list
        parts += [_explain_value(some, str(first[0]) if first else owner, prefix) for some in elements or [items]]
    return UsageError(f"{owner}: " + "; ".join(parts))


def _explain_value(items: Sequence[Any], name: str, prefix: str) -> str:
    """What is wrong with one value. There is one item for each type that the value may have."""
    item = items[0]
    index = f"[{item['loc'][-1]}]" if item["loc"] and isinstance(item["loc"][-1], int) else ""
    where = prefix + (name.replace("_", "-") if prefix else name) + index
    words = [i["msg"].removeprefix("Value error, ").removeprefix("Input should be ") for i in items]
    wanted = ", or ".join(dict.fromkeys(word.partition(", unable to parse")[0] for word in words))
    if item["type"] == "missing":
        return f"{where} is missing"
    if item["type"] == "value_error":
        return f"{where}: {wanted}"
    return f"{where}={item['input']!r} is not possible: should be {wanted}"
