"""Runs fuzzers: each in a process of its own, forked from this one, so that what kills it is a result too."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.fuzz.guard import Guard, Refused, scratch_folder
from thinwire.errors import ThinwireError

STUCK_SECONDS = 120.0  # without the end of a case; most of it is for a busy machine
MOST_LETTERS = 5000  # of an error's message
NOT_PREPARED = 3  # how a process ends that could not begin
STATE = struct.Struct("qqq")  # of a process: its case, how many were accepted and how many refused
Case = Callable[[Random], object]


class Fuzzer(NamedTuple):
    """Cases of one kind. `prepare` makes what all cases need in a folder, and returns the function of a case.

    A case may raise a ThinwireError, as users see them, and nothing else; it asserts what else must hold.
    """

    name: str
    about: str
    share: int  # of all cases, in relation to other fuzzers
    prepare: Callable[[Path], Case]


@dataclass
class Outcome:
    """What became of the cases of a fuzzer."""

    name: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    crashes: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)  # code executed, files elsewhere opened, connections made


def seed_of(fuzzer: str, seed: int, number: int) -> Random:
    """The random numbers of one case."""
    return Random(f"{fuzzer}:{seed}:{number}")


def one_case(fuzzer: Fuzzer, case: Case, guard: Guard, rng: Random) -> bool:
    """Run one case; returns whether its input was accepted. Raises what no case may."""
    with guard.watching():
        try:
            case(rng)
        except ThinwireError as error:
            _check_message(str(error))
            return False
    return True


def _check_message(message: str) -> None:
    assert message.strip(), "an error without a message"
    assert len(message) <= MOST_LETTERS, f"a message of {len(message)} letters"
    unseen = [one for one in message if not one.isprintable()]
    assert not unseen, f"the message is not one line of text: it has {unseen[:3]!r}"


def run(
    fuzzers: Sequence[Fuzzer], cases: int, seed: int, jobs: int, show: Callable[[int, int, float], None]
) -> list[Outcome]:
    """So many cases over all fuzzers, each in proportion to its share; `show(done, all, seconds)` is progress."""
    begin, shares = time.monotonic(), sum(fuzzer.share for fuzzer in fuzzers)
    waiting = [_Process(one, max(1, round(cases * one.share / shares)), seed) for one in fuzzers]
    every, total = list(waiting), sum(one.count for one in waiting)
    running: list[_Process] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.02)
            running = [one for one in running if one.goes_on()]
            show(sum(one.done for one in every), total, time.monotonic() - begin)
    finally:
        for one in running:
            one.kill()
    return [one.outcome for one in every]


class _Process:
    """The process of a fuzzer. After a case that ended it, another one goes on with the next case."""

    def __init__(self, fuzzer: Fuzzer, count: int, seed: int) -> None:
        self.fuzzer, self.count, self.seed = fuzzer, count, seed
        self.state = mmap.mmap(-1, STATE.size)  # shared with the process
        self.outcome = Outcome(fuzzer.name, count)
        self.done = self.pid = 0
        self.changed_at = time.monotonic()

    def start(self) -> None:
        self.begin = time.monotonic()
        self._fork(0)

    def _fork(self, first: int) -> None:
        reader, writer = os.pipe()
        STATE.pack_into(self.state, 0, first, *STATE.unpack_from(self.state)[1:])
        self.changed_at = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            try:
                _serve(self.fuzzer, self.seed, range(first, self.count), self.state, writer)
            except BaseException as error:
                _tell(writer, first, error)
                os._exit(NOT_PREPARED)
            os._exit(0)
        os.close(writer)
        self.reader, self.text = reader, b""
        os.set_blocking(reader, False)

    def goes_on(self) -> bool:
        """Look after the process; returns whether there are cases left."""
        at, accepted, refused = STATE.unpack_from(self.state)
        if at != self.done:
            self.done, self.changed_at = at, time.monotonic()
        self._read()
        if time.monotonic() - self.changed_at > STUCK_SECONDS:
            os.kill(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return True
        at, accepted, refused = STATE.unpack_from(self.state)
        self._read()
        self._close()
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_PREPARED:
            at = self.count
        elif os.WIFSIGNALED(status) or at < self.count:
            stuck = time.monotonic() - self.changed_at > STUCK_SECONDS
            how = "hangs" if stuck else f"the process ended ({_end(status)})"
            self.outcome.crashes.append(f"{self.fuzzer.name}:{at}: {how}")
            if at + 1 < self.count:
                self._fork(at + 1)
                return True
        self.done = self.count
        self.outcome.accepted, self.outcome.refused = accepted, refused
        self.outcome.seconds = time.monotonic() - self.begin
        return False

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self.reader, 2**16):
                self.text += part
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            found: dict[str, Any] = json.loads(line)
            kept = self.outcome.executed if found["executed"] else self.outcome.crashes
            kept.append(f"{self.fuzzer.name}:{found['case']}: {found['why']}")

    def _close(self) -> None:
        os.close(self.reader)
        self.pid = 0

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._close()


def _end(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def _serve(fuzzer: Fuzzer, seed: int, numbers: range, state: mmap.mmap, pipe: int) -> None:
    """Run cases in this process, and write what no case may do to a pipe."""
    with prepared(fuzzer) as (case, guard):
        _, accepted, refused = STATE.unpack_from(state)
        for number in numbers:
            STATE.pack_into(state, 0, number, accepted, refused)
            try:
                is_accepted = one_case(fuzzer, case, guard, seed_of(fuzzer.name, seed, number))
                accepted, refused = accepted + is_accepted, refused + (not is_accepted)
            except BaseException as error:
                _tell(pipe, number, error)
        STATE.pack_into(state, 0, numbers.stop, accepted, refused)


def _tell(pipe: int, number: int, error: BaseException) -> None:
    executed = isinstance(error, Refused) and "computes for" not in str(error)
    found = {"case": number, "why": describe(error), "executed": executed}
    os.write(pipe, json.dumps(found).encode() + b"\n")


class prepared:
    """A fuzzer's case, in a folder of its own and with nothing printed; and the guard of this process."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self.fuzzer = fuzzer

    def __enter__(self) -> tuple[Case, Guard]:
        import torch

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.folder = scratch_folder()
        self.null = open(os.devnull, "w")
        self.quiet = [redirect_stdout(self.null), redirect_stderr(self.null)]
        for one in self.quiet:
            one.__enter__()
        os.environ["TMPDIR"] = self.folder.name
        os.chdir(self.folder.name)
        case = self.fuzzer.prepare(Path(self.folder.name))
        return case, Guard(Path(self.folder.name))

    def __exit__(self, *error: object) -> None:
        for one in self.quiet:
            one.__exit__(None, None, None)
        self.null.close()
        self.folder.cleanup()


def describe(error: BaseException) -> str:
    """An error and where in the project it was raised, in one line."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "/thinwire/" in one.filename]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def lines(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """The rows of the table: fuzzer, cases, accepted, refused, crashes, executed, seconds."""
    for one in outcomes:
        counts = (one.cases, one.accepted, one.refused, len(one.crashes), len(one.executed))
        yield [one.name, *map(str, counts), f"{one.seconds:.1f}"]
