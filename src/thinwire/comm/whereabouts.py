"""Where each rank is, as far as ranks tell each other, and which of them are late."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from thinwire.common.durations import format_duration

PURPOSES = {
    "train": "training",
    "sync": "merging",
    "eval": "evaluation",
    "checkpoint": "a checkpoint",
    "start": "the start",
}


@dataclass(frozen=True)
class Operation:
    """An operation that a rank is in. It waits for those members that have begun fewer than `number` with this key."""

    key: str
    number: int
    members: Sequence[int]  # their ranks in the world
    name: str
    purpose: str
    step: int = 0

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step else ""
        return f"{self.name} of {PURPOSES.get(self.purpose, self.purpose)}{step}"


@dataclass(frozen=True)
class Whereabouts:
    """What a rank tells the others: `beat` grows for as long as its process works."""

    beat: int = 0
    doing: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)  # operations begun, by key
    waiting: Operation | None = None  # the one that it has been in for longest

    def to_json(self) -> str:
        """For the store.

        >>> here = Whereabouts(3, "training step 2", {"world": 7}, Operation("world", 7, (0, 1), "sum", "train"))
        >>> Whereabouts.from_json(here.to_json()) == here
        True
        """
        waiting = self.waiting and list(asdict(self.waiting).values())
        return json.dumps([self.beat, self.doing, dict(self.counts), waiting], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Whereabouts:
        """What a rank has left in the store."""
        beat, doing, counts, waiting = json.loads(text)
        return cls(
            beat, doing, counts, Operation(waiting[0], waiting[1], tuple(waiting[2]), *waiting[3:]) if waiting else None
        )


def find_late(
    operation: Operation, found: Mapping[int, Whereabouts], silent: Collection[int] = ()
) -> dict[int, Operation]:
    """The ranks that an operation waits for, and for each the operation that it has not begun.

    A rank that waits for another one itself is not late; the other one is. It waits if any of its threads does: torch
    does not say whether the computing thread waits for a communication thread. A silent rank is late wherever it was.
    Nobody is late if all are in their operations and the network is slow.

    >>> world, pair = Operation("world", 3, (0, 1, 2), "sum", "train"), Operation("pair", 1, (1, 2), "sum", "train")
    >>> found = {0: Whereabouts(waiting=world), 1: Whereabouts(waiting=pair), 2: Whereabouts(counts={"world": 2})}
    >>> list(find_late(world, found))
    [2]
    """
    late: dict[int, Operation] = {}
    asked: set[int] = set()
    todo = [operation]
    while todo:
        one = todo.pop()
        for rank in one.members:
            known = found.get(rank, Whereabouts())
            has_begun = known.counts.get(one.key, 0) >= one.number
            if rank in asked or (has_begun and rank not in silent):
                continue
            asked.add(rank)
            if known.waiting is None or rank in silent:
                late[rank] = one
            else:
                todo.append(known.waiting)
    return dict(sorted(late.items())) or dict.fromkeys(sorted(silent), operation)


def describe(late: Mapping[int, Operation], states: Mapping[int, str], age: float, operation: Operation) -> str:
    """Who is late, where the others wait, and since when.

    >>> step = Operation("world", 3, (0, 1, 2), "all_reduce", "train", 12)
    >>> describe({2: step}, {2: "no sign of life for 38 s"}, 40, step)
    'rank 2 (no sign of life for 38 s) has not reached all_reduce of training, step 12, for 40 s'
    """
    if not late:
        return f"all ranks are in {operation}, for {format_duration(age)}: the network is slow, or stands still"
    names = [f"rank {rank} ({states[rank]})" if states.get(rank) else f"rank {rank}" for rank in late]
    where = " and ".join(dict.fromkeys(map(str, late.values())))
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{who} {'has' if len(late) == 1 else 'have'} not reached {where}, for {format_duration(age)}"
