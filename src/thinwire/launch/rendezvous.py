"""Where the ranks of one machine meet: on 127.0.0.1, or on the first of its netlab hosts; anew for every (re)start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from thinwire.comm.store import loopback_store
from thinwire.comm.world import DEFAULT_PORT
from thinwire.errors import RunError, UsageError


class LocalRendezvous(RendezvousHandler):
    """A rendezvous of one agent. torch's own open their store on every interface and break gloo on a restart.

    The agent is on none of netlab's hosts, so there rank 0 opens the store, at `address`.
    """

    def __init__(self, num_ranks: int, restarts: int, notes: Path, address: str | None = None) -> None:
        self.num_ranks = num_ranks
        self.address = address
        self.restarts = restarts
        self.notes = notes  # where failing ranks write why
        self.num_rounds = 0
        self.store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self.num_rounds:
            print(f"{self._cause()}; restart {self.num_rounds} of {self.restarts}", file=sys.stderr, flush=True)
        self.num_rounds += 1
        if self.address is not None:
            where = RendezvousStoreInfo(self.address, DEFAULT_PORT + self.num_rounds)  # the whole host is ours
            return RendezvousInfo(HashStore(), 0, 1, where)
        self.store = store = loopback_store(self.num_ranks)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", store.port))

    def _cause(self) -> str:
        """Why the last round ended. What would only happen again is raised instead."""
        notes = [json.loads(path.read_text()) for path in sorted(self.notes.glob("*.json"))]
        for path in self.notes.glob("*.json"):
            path.unlink()
        for note in notes:
            if note["kind"] in ("UsageError", "RunError"):
                raise (UsageError if note["kind"] == "UsageError" else RunError)(note["message"])
        own = [note for note in notes if note["kind"] != "PeerLost"]
        return f"rank {own[0]['rank']} failed: {own[0]['kind']}: {own[0]['message']}" if own else "a rank died"

    @property
    def use_agent_store(self) -> bool:
        return self.address is None

    def get_backend(self) -> str:
        return "loopback"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "thinwire"

    def shutdown(self) -> bool:
        self.store = None
        return True
