"""What an examination finds: its type, and values of many ranks as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Level = Literal["ok", "note", "warning", "failure"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "failure")


class Finding(NamedTuple):
    """One thing that was examined: what it is, what was found, what that means and what to try.

    A failure would end a run, or keep it from starting. A warning would make it slow, wrong to measure, or readable for
    others. A note is worth knowing.
    """

    level: Level
    title: str
    value: str
    meaning: str = ""
    advice: str = ""


def worst(findings: Sequence[Finding]) -> Level:
    """The highest level of all.

    >>> worst([Finding("ok", "disk", "9 GB"), Finding("warning", "memory", "0.1 GB")])
    'warning'
    """
    return max((one.level for one in findings), key=LEVELS.index, default="ok")


def spell_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text.

    >>> spell_ranks([3]), spell_ranks([0, 1, 2, 5]), spell_ranks([4, 6])
    ('rank 3', 'ranks 0–2, 5', 'ranks 4, 6')
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = [f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def by_rank(values: Sequence[str]) -> str:
    """One value if all ranks have the same, else each value with its ranks.

    >>> by_rank(["2.11", "2.11"]), by_rank(["2.11", "2.9", "2.11"])
    ('2.11', '2.11 on ranks 0, 2; 2.9 on rank 1')
    """
    found = {value: [rank for rank, one in enumerate(values) if one == value] for value in values}
    if len(found) == 1:
        return values[0]
    return "; ".join(f"{value} on {spell_ranks(ranks)}" for value, ranks in found.items())
