"""Why ranks failed: the files in which ranks write their errors, and the error that the user sees."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from thinwire.errors import RunError, ThinwireError, UsageError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ROOM_BYTES = 2**15  # for the failure of a rank, taken from the disk before there is one


class Failure(NamedTuple):
    """An error of one rank."""

    rank: int
    kind: str  # the class of the error; empty if the process ended without one
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The error that a rank handles."""
        return cls(rank, type(error).__name__, str(error), traceback.format_exc())

    def write(self, folder: Path) -> None:
        """Leave it for the launcher, in the room that was made for it: the disk may be full by now."""
        most, data = ROOM_BYTES, b" " * (ROOM_BYTES + 1)
        while len(data) > ROOM_BYTES:
            short = self._replace(message=self.message[:most], traceback=self.traceback[-most:])
            most, data = most // 2, json.dumps(short._asdict()).encode()
        _write_over(_file(folder, self.rank), data)


def make_room(folder: Path, ranks: Iterable[int]) -> None:
    """Make the files of the failures of ranks, which are empty, and as large as they can become."""
    try:
        for rank in ranks:
            _file(folder, rank).write_bytes(b" " * ROOM_BYTES)
    except OSError as error:
        raise RunError(
            f"cannot write {folder}: {error.strerror}; free some space, or set TMPDIR to another folder"
        ) from error


def read_failures(folder: Path) -> list[Failure]:
    """The failures that ranks have written, without those whose ranks were killed while they wrote."""
    failures = []
    for path in sorted(folder.glob("*.failure")):
        try:
            failures.append(Failure(**json.loads(path.read_bytes())))
        except ValueError:  # nothing, or not all of it
            continue
    return sorted(failures)


def pop_failures(folder: Path) -> list[Failure]:
    """The failures that ranks have written, which are then forgotten."""
    failures = read_failures(folder)
    for path in folder.glob("*.failure"):
        _write_over(path, b"")
    return failures


def _write_over(file: Path, data: bytes) -> None:
    """Fill the room of a failure, without giving any of it back to the disk."""
    with file.open("r+b", buffering=0) as stream:
        stream.write(data.ljust(ROOM_BYTES))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.failure"


class WorldLost(RunError):
    """A rank of the world itself has ended or does not answer, so no further run is possible in it."""


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """The first cause: a rank that lost another one is none."""
    return min(failures, key=lambda failure: failure.kind == "PeerLost", default=None)


def cause_of(failure: Failure) -> ThinwireError:
    """A failure as an error that names the rank, and shows the traceback of an error in code."""
    if failure.kind == "UsageError":
        return UsageError(failure.message)
    if failure.kind in ("RunError", "PeerLost"):
        return RunError(f"rank {failure.rank}: {failure.message}")
    if not failure.kind:
        return RunError(f"rank {failure.rank} {failure.message}")
    return RunError(f"rank {failure.rank} failed: {failure.kind}: {failure.message}\n{failure.traceback}")


def first_cause(ended: dict[int, ProcessFailure], written: Sequence[Failure]) -> ThinwireError:
    """The first cause among ranks that torch's agent found ended, and what they have written."""
    by_rank = {failure.rank: failure for failure in written}
    found = [by_rank.get(rank) or _without_a_word(rank, failure) for rank, failure in sorted(ended.items())]
    first = first_of(found)
    assert first is not None
    return cause_of(first)


def _without_a_word(rank: int, failure: ProcessFailure) -> Failure:
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"
    how += "" if failure.exitcode else " before its work was done"
    return Failure(rank, "", ended(failure.pid, how))


def ended(pid: int | None, how: str) -> str:
    """The message about a process that ended without an error of its own."""
    return f"(process {pid}) {how}; --resume goes on"
