"""Why ranks failed: the files in which ranks write their errors, and the error that the user sees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.errors import RunError, ThinwireError, UsageError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class Failure(NamedTuple):
    """An error of one rank."""

    rank: int
    kind: str  # the class of the error; empty if the process ended without one
    message: str
    traceback: str = ""

    def write(self, folder: Path) -> None:
        """Leave it for the launcher, which decides whether to restart."""
        (folder / f"{self.rank}.json").write_text(json.dumps(self._asdict()))


def pop_failures(folder: Path) -> list[Failure]:
    """The failures that ranks have written. Their files are removed."""
    failures = []
    for path in sorted(folder.glob("*.json")):
        failures.append(Failure(**json.loads(path.read_text())))
        path.unlink()
    return failures


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


def first_cause(failures: dict[int, ProcessFailure]) -> ThinwireError:
    """The first cause among ranks that torch's agent found failed."""
    found = sorted(failures.items(), key=lambda item: item[1].timestamp)
    first = first_of([_as_failure(rank, failure) for rank, failure in found])
    assert first is not None
    return cause_of(first)


def _as_failure(rank: int, failure: ProcessFailure) -> Failure:
    kind, _, text = _message(failure).partition(": ")
    if kind in ("UsageError", "RunError", "PeerLost") or (failure.exitcode >= 0 and failure.error_file_data):
        return Failure(rank, kind, text, _traceback(failure))
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"
    return Failure(rank, "", ended(failure.pid, how))


def ended(pid: int | None, how: str) -> str:
    """The message about a process that ended without an error of its own."""
    return f"(process {pid}) {how}; --resume goes on"


def _message(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message.get("message", message)) if isinstance(message, dict) else str(message)


def _traceback(failure: ProcessFailure) -> str:
    data = failure.error_file_data.get("message", {})
    return str(data.get("extraInfo", {}).get("py_callstack", "")) if isinstance(data, dict) else ""
