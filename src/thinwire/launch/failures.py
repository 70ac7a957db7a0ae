"""Why ranks failed: the files in which ranks write their errors, and the error that the user sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.errors import RunError, ThinwireError, UsageError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class Failure(NamedTuple):
    """An error of one rank."""

    rank: int
    kind: str  # the class of the error
    message: str

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


def first_cause(failures: dict[int, ProcessFailure]) -> ThinwireError:
    """The first cause among failed ranks, as an error that names the rank and shows its traceback."""
    rank, failure = min(failures.items(), key=lambda item: ("PeerLost" in _message(item[1]), item[1].timestamp))
    message = _message(failure)
    kind, _, text = message.partition(": ")
    if kind == "UsageError":
        return UsageError(text)
    if kind in ("RunError", "PeerLost"):
        return RunError(f"rank {rank}: {text}")
    if failure.exitcode < 0:
        return RunError(f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}; --resume goes on")
    if not failure.error_file_data:
        return RunError(f"rank {rank} (process {failure.pid}) ended with code {failure.exitcode}; --resume goes on")
    return RunError(f"rank {rank} failed: {message}\n{_traceback(failure)}")


def _message(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message.get("message", message)) if isinstance(message, dict) else str(message)


def _traceback(failure: ProcessFailure) -> str:
    data = failure.error_file_data.get("message", {})
    return str(data.get("extraInfo", {}).get("py_callstack", "")) if isinstance(data, dict) else ""
