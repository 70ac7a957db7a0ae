"""The groups of AB-training: which ranks form a group, and which factor each group trains."""

from __future__ import annotations

from typing import Literal, NamedTuple

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.strategies.groups import equal_groups, ranks_by_node

Role = Literal["A", "B", "AB"]  # the factors that a group trains


class Groups(NamedTuple):
    """All groups, and the role of each: half of them train A, the others B; a single group trains both."""

    ranks: list[list[int]]
    roles: list[Role]

    def role_of(self, rank: int) -> Role:
        """The role of a rank's group."""
        return next(role for ranks, role in zip(self.ranks, self.roles, strict=True) if rank in ranks)

    def num_training(self, factor: str) -> int:
        """How many ranks train a factor, "A" or "B"."""
        return sum(len(ranks) for ranks, role in zip(self.ranks, self.roles, strict=True) if factor in role)


def make_groups(comm: Comm, size: int | None) -> Groups:
    """Groups of `size` ranks; by default the nodes or, on one node, two halves of all ranks."""
    all_ranks, nodes = list(range(comm.size)), ranks_by_node(comm)
    halves = [half for half in (all_ranks[: comm.size // 2], all_ranks[comm.size // 2 :]) if half]
    default = nodes if len(nodes) > 1 else halves
    groups = default if size is None else equal_groups(comm, size, "ab: group_size")
    if len(groups) == 1:
        advice = "group_size=… makes several groups" if comm.size > 1 else "start more ranks to save bytes"
        say(f"ab: there is only one group, so it trains both factors; {advice}", comm.rank)
        return Groups(groups, ["AB"])
    return Groups(groups, ["A" if i % 2 == 0 else "B" for i in range(len(groups))])
