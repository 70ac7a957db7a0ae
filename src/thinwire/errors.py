"""The two kinds of error a user sees. Each message says what was given, what is possible and what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ThinwireError(Exception):
    """An error with a message for the user; the command line prints it without a traceback."""

    exit_code = 1


class UsageError(ThinwireError, ValueError):
    """The request itself cannot be carried out: a wrong name, option, value or file."""

    exit_code = 2


class RunError(ThinwireError, RuntimeError):
    """The request was sound, but the run failed."""


class Stopped(RunError):
    """Somebody ended the run: Ctrl-C, or a signal."""

    exit_code = 130


class PeerLost(RunError):
    """Another rank ended or stopped answering: the cause is there, not here."""


def unknown(kind: str, given: str, possible: Iterable[str]) -> UsageError:
    """The error for a name that is not in a table, with the nearest name that is.

    >>> print(unknown("strategy", "data_paralel", ["data_parallel", "daso"]))
    unknown strategy 'data_paralel'; did you mean 'data_parallel'? Possible: daso, data_parallel
    """
    names = sorted(possible)
    near = difflib.get_close_matches(given.lower().replace("-", "_"), names, n=1)
    hint = f"did you mean '{near[0]}'? Possible" if near else "possible"
    return UsageError(f"unknown {kind} '{given}'; {hint}: {', '.join(names) or 'none'}")
