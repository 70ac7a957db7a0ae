"""A single process: what it gets in place of an exchange."""

from __future__ import annotations

from typing import Any

from thinwire.comm.ledger import Ledger
from thinwire.errors import UsageError


class Alone:
    """Nothing is sent, and there is no state."""

    def __init__(self) -> None:
        self._ledger = Ledger()

    @property
    def ledger(self) -> Ledger:
        """Empty."""
        return self._ledger

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state of several ranks."""
        if state:
            raise UsageError(f"the state is of rank {state.get('rank')}, and this is a single process")

    def close(self) -> None:
        """Nothing to do."""
