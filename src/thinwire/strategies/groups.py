"""Ranks in groups: those of each node, or neighbours in groups of equal size."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.errors import UsageError


def ranks_by_node(comm: Comm) -> list[list[int]]:
    """The ranks of each node."""
    return [[r for r in range(comm.size) if comm.nodes[r] == node] for node in sorted(set(comm.nodes))]


def equal_groups(comm: Comm, size: int, option: str) -> list[list[int]]:
    """Neighbouring ranks in groups of one size; `option` names it in errors. A world of one rank is one group."""
    if comm.size > 1 and comm.size % size:
        possible = [n for n in range(1, comm.size) if comm.size % n == 0]
        raise UsageError(
            f"{option}={size} does not divide {comm.size} ranks; try {' or '.join(map(str, possible))}, "
            "or leave it out: groups may then be of unequal size"
        )
    return [list(range(r, min(r + size, comm.size))) for r in range(0, comm.size, size)]


def choose_nodes(comm: Comm, ranks_per_node: int | None) -> list[list[int]]:
    """The ranks of each node of `daso`: those of one machine, or so many."""
    if comm.link == "between":  # shards of nodes, which are each other's peers
        nodes = [[rank] for rank in range(comm.size)]
    elif ranks_per_node is None:
        nodes = ranks_by_node(comm)
    else:
        nodes = equal_groups(comm, ranks_per_node, "daso: ranks_per_node")
    if len(nodes) == 1:
        advice = f"more than {ranks_per_node} ranks make" if ranks_per_node else "ranks_per_node=… makes"
        say(f"daso: all ranks are on one node, so this is data_parallel; {advice} several nodes", comm.rank)
    return nodes


def first_alike(kinds: Sequence[Hashable]) -> list[int]:
    """For each rank, the first one of the same kind.

    >>> first_alike(["A", "A", "B", "A"])
    [0, 0, 2, 0]
    """
    first: dict[Hashable, int] = {}
    return [first.setdefault(kind, rank) for rank, kind in enumerate(kinds)]
