"""Which ranks belong together."""

from __future__ import annotations

from thinwire.comm.base import Comm
from thinwire.errors import UsageError


def nodes_of(comm: Comm) -> list[list[int]]:
    """The ranks of each node, as they were started."""
    return [[r for r in range(comm.size) if comm.nodes[r] == node] for node in sorted(set(comm.nodes))]


def groups_of(comm: Comm, size: int, option: str) -> list[list[int]]:
    """Neighbouring ranks in groups of one size; one rank alone is a group whatever the size."""
    if comm.size > 1 and comm.size % size:
        possible = [n for n in range(1, comm.size) if comm.size % n == 0]
        raise UsageError(
            f"{option}={size} does not divide {comm.size} ranks; try {' or '.join(map(str, possible))}, "
            "or leave it out: groups may then be of unequal size"
        )
    return [list(range(r, min(r + size, comm.size))) for r in range(0, comm.size, size)]
