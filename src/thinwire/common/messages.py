"""Messages to the user, through the logger "thinwire".

Without further setup they go to standard error as "thinwire: …". A program that wants them elsewhere sets up that
logger: logging.getLogger("thinwire").handlers = […], or its level.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("thinwire")


def say(text: str, rank: int = 0, *, once: bool = False) -> None:
    """Tell the user something. Only rank 0 speaks; with `once`, only the first time in this process."""
    if rank != 0 or (once and text in _said):
        return
    if once:
        _said.add(text)
    logger.info(text)


def print_line(text: str) -> None:
    """A line on standard error. If nobody reads it any more, the work goes on in silence."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


_said: set[str] = set()


class _ToStandardError(logging.Handler):
    """Writes to what sys.stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(f"thinwire: {record.getMessage()}")


if not logger.handlers:  # else the program has set it up already
    logger.addHandler(_ToStandardError())
    logger.setLevel(logging.INFO)
    logger.propagate = False
