"""The rendezvous of the ranks of one machine, for torch's elastic agent. Every (re)start has a new store."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from thinwire.comm.open_store import OpenStore, open_store
from thinwire.comm.secret import Secret
from thinwire.comm.store import RUN_ID
from thinwire.comm.world import DEFAULT_PORT
from thinwire.common.messages import print_line
from thinwire.errors import RunError, UsageError
from thinwire.launch.failures import first_of, pop_failures


class LocalRendezvous(RendezvousHandler):
    """A rendezvous for one agent. torch's own open their store on every interface and break gloo on a restart.

    The launcher opens the store, at `address`. With netlab, rank 0 opens it, because the launcher is on none of the
    hosts: then the address is that of rank 0's host.
    """

    def __init__(
        self,
        num_ranks: int,
        restarts: int,
        failures: Path,
        address: str = "127.0.0.1",
        on_hosts: bool = False,
        secret: Secret | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.address = address
        self.on_hosts = on_hosts
        self.secret = secret
        self.restarts = restarts
        self.failures = failures  # the folder in which ranks write their failures
        self.num_starts = 0
        self.opened: OpenStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self.num_starts:
            print_line(f"{self._describe_failure()}; restart {self.num_starts} of {self.restarts}")
        self.num_starts += 1
        if self.on_hosts:
            where = RendezvousStoreInfo(
                self.address, DEFAULT_PORT + self.num_starts
            )  # no other program uses the host's ports
            return RendezvousInfo(HashStore(), 0, 1, where)
        self._close()
        self.opened = open_store(self.num_ranks, self.address, secret=self.secret)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.address, self.opened.port))

    def _close(self) -> None:
        if self.opened is not None:
            self.opened.close()
            self.opened = None

    def _describe_failure(self) -> str:
        """Why the last start failed. An error that would happen again is raised."""
        failures = pop_failures(self.failures)
        for failure in failures:
            if failure.kind in ("UsageError", "RunError"):
                raise (UsageError if failure.kind == "UsageError" else RunError)(failure.message)
        first = first_of(failures)
        if first is None or (first.kind == "PeerLost" and len(failures) < self.num_ranks):
            return "a rank died"  # it wrote nothing; the others lost it
        how = "" if first.kind == "PeerLost" else f" failed: {first.kind}"
        return f"rank {first.rank}{how}: {first.message}"

    @property
    def use_agent_store(self) -> bool:
        return not self.on_hosts

    def get_backend(self) -> str:
        return "loopback"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return RUN_ID

    def shutdown(self) -> bool:
        self._close()
        return True
