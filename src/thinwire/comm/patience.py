"""Patience: how long ranks wait for each other. What a user does not set follows from the link and the model."""

from __future__ import annotations

from thinwire.common.durations import MOST_SECONDS, POSSIBLE, parse_duration
from thinwire.errors import UsageError

DEFAULT_SECONDS = 1800.0  # a notice after seconds tells who is late, so to be patient costs no knowledge
TRANSFERS = 4  # of a whole model to all ranks, over one link: more than any method sends in one message


def patience_seconds(given: float | str) -> float:
    """The seconds of a patience: a number of seconds, or a duration as "5m".

    >>> patience_seconds(90), patience_seconds("5m")
    (90.0, 300.0)
    """
    if isinstance(given, str):
        try:
            return parse_duration(given)
        except ValueError as error:
            raise UsageError(f"patience: {error}") from None
    if not 0 < given <= MOST_SECONDS:
        raise UsageError(f"patience={given}; possible: seconds as a number, or a duration: {POSSIBLE}")
    return float(given)


def default_patience(model_bytes: int, ranks: int, rate_mbit: float | None) -> float:
    """30 minutes and, on a link whose rate is known, what it needs for four times the model to every rank.

        seconds = 1800 + 4 · ranks · bytes · 8 / rate

    >>> default_patience(400_000_000, ranks=4, rate_mbit=None), default_patience(400_000_000, ranks=4, rate_mbit=1)
    (1800.0, 53000.0)
    """
    if not rate_mbit:
        return DEFAULT_SECONDS
    return min(MOST_SECONDS, DEFAULT_SECONDS + TRANSFERS * ranks * model_bytes * 8e-6 / rate_mbit)
