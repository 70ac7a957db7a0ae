"""A meeting: one attempt to commit a round, who makes it, and which attempt may follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Meeting:
    """One attempt to commit a round, and who makes it. Members are named by ids, which are never used again."""

    number: int  # of the attempt
    round: int
    members: tuple[int, ...]  # in the order of their places in the group
    began: tuple[int, ...]  # those who began the round: their order decides who trains which samples
    newcomers: tuple[int, ...]  # those of them who had nothing when the round began
    group: int  # the first attempt that was made by these members
    lost: dict[str, str] = field(default_factory=dict)  # in this round: id → why
    committed: bool = True  # whether the attempt before was
    lobby: int = 0  # newcomers who were let in so far
    ended: bool = False  # the run is finished or, without members, lost

    @staticmethod
    def read(found: dict[str, Any]) -> Meeting:
        """A meeting from its JSON."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in found.items()
        }
        return Meeting(**values)

    def after_commit(self, newcomers: Sequence[int], is_last: bool) -> Meeting:
        """The next round, with those who wait."""
        members, number = (*self.members, *newcomers), self.number + 1
        group = number if newcomers else self.group
        lobby = self.lobby + len(newcomers)
        return Meeting(number, self.round + 1, members, members, tuple(newcomers), group, lobby=lobby, ended=is_last)

    def without(self, lost: dict[int, str]) -> Meeting:
        """The same round again, by those who are left. If none of them has the state of the run, it is lost."""
        number, members = self.number + 1, tuple(one for one in self.members if one not in lost)
        known = self.lost | {str(one): why for one, why in lost.items()}
        is_over = all(one in self.newcomers for one in members)
        return replace(
            self, number=number, members=members, group=number, lost=known, committed=False, ended=is_over
        )  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """What a rank brings when it comes: the round of its state, and a fingerprint of it."""

    round: int
    fingerprint: int
