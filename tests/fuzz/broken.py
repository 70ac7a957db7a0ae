"""Fuzz cases that do what none may: to see that each is found."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fuzz.harness import Case, Fuzzer, run
from thinwire.errors import UsageError


def _raises() -> None:
    raise KeyError("not for users")


def _says_two_lines() -> None:
    error = UsageError("x")
    error.args = ("two\nlines",)
    raise error


def _takes_memory() -> None:
    bytearray(2**33)


def _computes() -> None:
    while True:
        pass


def _swallows() -> None:
    try:
        os.system("true")
    except BaseException:
        return


def _connects() -> None:
    with socket.socket() as one:
        one.connect(("127.0.0.1", 9))


FAULTS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "raises": _raises,
    "lines": _says_two_lines,
    "memory": _takes_memory,
    "time": _computes,
    "crash": lambda: ctypes.string_at(0),
    "exits": lambda: os._exit(0),
    "eval": lambda: eval("1 + 1"),
    "system": _swallows,
    "process": lambda: subprocess.run(["true"], check=False),
    "pickle": lambda: pickle.loads(pickle.dumps(os.getcwd)),
    "module": lambda: __import__("antigravity"),
    "reads": lambda: Path("/etc/passwd").read_text(),
    "writes": lambda: Path("/tmp/fuzz-broken").write_text("x"),
    "removes": lambda: os.remove("/tmp/fuzz-broken"),
    "connects": _connects,
}


def _prepare(fault: Callable[[], object]) -> Callable[[Path], Case]:
    def prepare(folder: Path) -> Case:
        def case(rng: Random) -> None:
            fault()

        return case

    return prepare


if __name__ == "__main__":
    fuzzers = [Fuzzer(name, "", 1, _prepare(fault)) for name, fault in FAULTS.items()]
    outcomes = run(fuzzers, 2 * len(fuzzers), 0, 2, lambda done, total, seconds: None)
    json.dump({one.name: [one.accepted, len(one.crashes), len(one.executed)] for one in outcomes}, sys.stdout)
