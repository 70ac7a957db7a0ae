"""Notes that members leave for each other in the store, and the end of the store as an error."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from thinwire.comm.secret import Secret
from thinwire.errors import RunError, Stopped

ANSWER_SECONDS = 60


class StoreLost(RunError):
    """The store that holds the membership does not answer any more."""


class Notes:
    """JSON values in a store, by key. Each thread that may wait needs notes of its own (`another`)."""

    def __init__(self, connect: Callable[[], dist.Store], where: str, secret: Secret | None = None) -> None:
        self._connect, self._where = connect, where
        self.secret = secret  # that everyone must know whose notes these are
        with self._errors():
            self.store = connect()

    def another(self) -> Notes:
        """The same notes, over another connection."""
        return Notes(self._connect, self._where, self.secret)

    def read(self, key: str) -> Any:
        """A value, or None if there is none yet."""
        with self._errors():
            return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def write(self, key: str, value: Any = "") -> None:
        """Set a value."""
        with self._errors():
            self.store.set(key, json.dumps(value))

    def decide(self, key: str, value: Any) -> Any:
        """Set a value if there is none yet; returns the one that is there, whoever set it."""
        with self._errors():
            return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def append(self, key: str, value: Any) -> None:
        """Add an entry to a list, in one operation: a rank that ends meanwhile leaves no gap in it."""
        store: Any = self.store  # torch's type hints do not know it
        with self._errors():
            store.append(key, json.dumps(value) + "\n")

    def entries(self, key: str) -> list[Any]:
        """The entries of a list."""
        with self._errors():
            text = self.store.get(key) if self.store.check([key]) else b""
            return [json.loads(line) for line in text.splitlines()]

    def has(self, keys: Sequence[str]) -> bool:
        """Whether there is a value for each of the keys."""
        with self._errors():
            return bool(self.store.check(list(keys)))

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter, which begins at 0; returns its value."""
        with self._errors():
            return int(self.store.add(key, more))

    def counts(self, keys: Sequence[str]) -> list[int]:
        """The values of counters that were begun."""
        with self._errors():
            return [int(value) for value in self.store.multi_get(list(keys))]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Stopped:  # a signal came meanwhile
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise StoreLost(f"the store at {self._where} does not answer any more ({reason})") from error


def client(host: str, port: int) -> dist.TCPStore:
    """A connection to a store."""
    timeout = datetime.timedelta(seconds=ANSWER_SECONDS)
    return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
