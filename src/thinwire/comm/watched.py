"""A Comm whose operations a watch counts, so that ranks know who is late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from thinwire.comm.base import Comm
from thinwire.comm.process_groups import ProcessGroup, give_grace, lengthen_timeout, meet
from thinwire.comm.watch import Watch
from thinwire.comm.whereabouts import Operation
from thinwire.errors import PeerLost


class WatchedComm(Comm):
    """What all groups of a world have in common: its watch, where each has a name of its own."""

    group: ProcessGroup
    side_group: ProcessGroup
    watch: Watch | None
    name: str  # the same on all ranks of the group, and on no two groups of a rank
    members: tuple[int, ...]  # their ranks in the world

    def be_patient(self, seconds: float) -> None:
        for group in (self.group, self.side_group):
            lengthen_timeout(group, seconds)
        if self.watch is not None:
            self.watch.patience = max(seconds, self.watch.patience)

    def note(self, doing: str) -> None:
        if self.watch is not None:
            self.watch.doing = doing

    def begin(self, op: str, peer: int | None = None) -> Operation | None:
        if self.watch is None:
            return None
        about = op, self.ledger.current_purpose, self.ledger.timeline.step_number
        if peer is None:
            return self.watch.begin(self.name, self.members, *about)
        return self.watch.begin_message(self.name, self.members[peer], *about)

    def meet(self, op: str) -> None:
        """Return once all ranks are here, for an operation; PeerLost if one is gone."""
        with self.inside(self.begin(op)):
            meet(self.group)

    @contextmanager
    def inside(self, begun: Operation | None) -> Iterator[None]:
        try:
            with self.watch.inside(begun) if self.watch and begun else nullcontext():
                yield
        except PeerLost:
            give_grace()
            raise
