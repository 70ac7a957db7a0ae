"""Messages: who says them, how often, and where they go."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from thinwire.common.messages import logger, print_line, say


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A handler that a program has put in the place of ours."""
    handler = Kept()
    monkeypatch.setattr(logger, "handlers", [handler])
    return handler


@pytest.fixture
def root() -> Iterator[Kept]:
    """A handler of the root logger."""
    handler = Kept()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_only_rank_0_speaks(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    say("hello", rank)
    assert capsys.readouterr() == ("", "thinwire: hello\n" if rank == 0 else "")


def test_once_is_once_in_a_process_for_each_text(kept: Kept) -> None:
    for _ in range(3):
        say("test_messages: first", once=True)
        say("test_messages: second", once=True)
        say("again")
    assert kept.messages == ["test_messages: first", "test_messages: second", "again", "again", "again"]


def test_what_another_rank_would_have_said_does_not_count_as_said(kept: Kept) -> None:
    """Ranks that are threads share what was said."""
    for rank in (1, 0, 2, 0):
        say("test_messages: by rank 0", rank, once=True)
    assert kept.messages == ["test_messages: by rank 0"]


def test_a_text_is_no_format(kept: Kept) -> None:
    say("100 % of {ranks} %s")
    assert kept.messages == ["100 % of {ranks} %s"]


def test_a_program_can_take_the_messages(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    assert kept.messages == ["hello"]
    assert capsys.readouterr().err == ""


def test_a_program_can_silence_them(kept: Kept) -> None:
    logger.setLevel(logging.WARNING)
    say("hello")
    logger.setLevel(logging.INFO)
    assert kept.messages == []


def test_the_root_logger_gets_them_only_if_a_program_asks(
    root: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say("hello")
    assert root.messages == []
    monkeypatch.setattr(logger, "propagate", True)
    say("hello")
    assert root.messages == ["hello"]
    assert capsys.readouterr().err == "thinwire: hello\n" * 2


def test_a_logger_that_was_set_up_before_the_import_keeps_its_handlers() -> None:
    done = run("""
import logging, sys
logger = logging.getLogger("thinwire")
logger.addHandler(logging.StreamHandler(sys.stdout))
from thinwire.common.messages import say
say("info")
logger.setLevel(logging.INFO)
say("now")
print(len(logger.handlers), logger.propagate)
""")
    assert (done.stdout, done.stderr) == ("info\nnow\n1 True\n", "")


def test_lines_are_whole_and_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("one")
    print_line("two")
    assert capsys.readouterr() == ("", "one\ntwo\n")


def test_the_work_goes_on_when_nobody_reads_standard_error() -> None:
    done = run("""
import os
from thinwire.common.messages import print_line, say
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(writer)
os.close(reader)
for i in range(3):
    print_line(f"line {i}")
    say("message")
print("done")
""")
    assert (done.stdout, done.stderr) == ("done\n", "")


HANDLER = "logging.getLogger('thinwire').addHandler(logging.StreamHandler(sys.stdout))"
LEVEL = "logging.getLogger('thinwire').setLevel(logging.WARNING)"
SAY = "from thinwire.common.messages import say; say('hello')"


@pytest.mark.parametrize("order", ["import thinwire as tw; {0}; {1}", "{0}; import thinwire as tw; {1}"])
def test_a_program_that_adds_a_handler_gets_the_messages(order: str) -> None:
    done = run(f"import logging, sys; {order.format(HANDLER, SAY)}")
    assert (done.stdout, done.stderr) == ("hello\n", "")


@pytest.mark.parametrize("order", ["import thinwire as tw; {0}; {1}", "{0}; import thinwire as tw; {1}"])
def test_a_level_that_a_program_sets_stays(order: str) -> None:
    done = run(f"import logging; {order.format(LEVEL, SAY)}")
    assert (done.stdout, done.stderr) == ("", "")


def test_errors_are_logged_as_errors(kept: Kept) -> None:
    logger.setLevel(logging.WARNING)
    say("it failed", level=logging.ERROR)
    logger.setLevel(logging.INFO)
    assert kept.messages == ["it failed"]


def test_a_line_takes_the_place_of_the_bar_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal, os.fdopen(os.dup(slave), "w") as own, os.fdopen(master, "rb", 0) as screen:
        monkeypatch.setattr(sys, "__stderr__", terminal)
        for stderr in (own, terminal):  # a process with a bar of its own has replaced sys.stderr
            monkeypatch.setattr(sys, "stderr", stderr)
            print_line("rank 2 is late")
        shown, expected = b"", b"rank 2 is late\r\n\r\x1b[2Krank 2 is late\r\n"
        while len(shown) < len(expected):
            shown += screen.read(100)
    assert shown == expected


def test_a_line_with_names_of_others_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("rank 3 (\x1b]0;title\x07\x1b[2J) joins\n2 ranks go on\r")
    assert capsys.readouterr().err == "rank 3 (\\x1b]0;title\\x07\\x1b[2J) joins\n2 ranks go on\\r\n"
