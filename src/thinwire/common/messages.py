"""Messages to the user, through the logger "thinwire".

By default they go to standard error as "thinwire: …", and not to the root logger. A program that wants them elsewhere
gives logging.getLogger("thinwire") a handler or a level of its own, before or after it imports thinwire.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.errors import one_line

logger = logging.getLogger("thinwire")
CLEAR_LINE = "\r\x1b[2K"
_said: set[str] = set()  # messages that are logged once
_thread = threading.local()


def say(text: str, rank: int = 0, *, once: bool = False, level: int = logging.INFO) -> None:
    """Log a message for the user, unless this is another rank than 0; with `once`, only the first time in this process.

    Without a rank it is logged wherever it is said.
    """
    if rank != 0 or getattr(_thread, "is_quiet", False) or (once and text in _said):
        return
    if once:
        _said.add(text)
    logger.log(level, text)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, this thread says nothing."""
    before, _thread.is_quiet = getattr(_thread, "is_quiet", False), True
    try:
        yield
    finally:
        _thread.is_quiet = before


def print_line(text: str) -> None:
    """Print a line on standard error. If its reader has gone, drop this line and all later ones, and go on.

    Names in it may come from other ranks, so nothing in it controls a terminal.

    In a terminal it takes the place of a progress bar that another process shows in the current line. The process of
    the bar itself has replaced sys.stderr, and moves the bar.
    """
    is_own = sys.stderr is sys.__stderr__
    clear = CLEAR_LINE if is_own and sys.__stderr__ is not None and sys.__stderr__.isatty() else ""
    try:
        print(clear + one_line(text, keep="\n\t"), file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class _ToStandardError(logging.Handler):
    """Writes to sys.stderr as it is when the message comes, not as it was when this module was imported."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(f"thinwire: {record.getMessage()}")


if not logger.handlers:  # otherwise the program has given it some
    logger.addHandler(_ToStandardError())
    logger.propagate = False
if logger.level == logging.NOTSET:  # otherwise the program has set it
    logger.setLevel(logging.INFO)
