"""Messages to the user, through the logger "thinwire".

By default they go to standard error as "thinwire: …", and not to the root logger. A program that wants them elsewhere
sets the handlers of logging.getLogger("thinwire"), and its level if it does so before it imports thinwire.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("thinwire")
_said: set[str] = set()  # messages that are logged once


def say(text: str, rank: int = 0, *, once: bool = False) -> None:
    """Log a message for the user on rank 0; with `once`, only the first time in this process."""
    if rank != 0 or (once and text in _said):
        return
    if once:
        _said.add(text)
    logger.info(text)


def print_line(text: str) -> None:
    """Print a line on standard error. If its reader has gone, drop this line and all later ones, and go on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class _ToStandardError(logging.Handler):
    """Writes to sys.stderr as it is when the message comes, not as it was when this module was imported."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(f"thinwire: {record.getMessage()}")


if not logger.handlers:  # otherwise the program has set it up
    logger.addHandler(_ToStandardError())
    logger.setLevel(logging.INFO)
    logger.propagate = False
