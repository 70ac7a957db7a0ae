"""One machine alone, beside a comparison: where it can be run, and whether it costs little."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from thinwire.common.formats import format_seconds
from thinwire.config import CompareConfig
from thinwire.errors import UsageError

SPEC = "alone"
REFERENCE = "data_parallel"
SHARE = 0.25  # of the time that the other runs took: what a baseline may take that nobody asked for


class Decision(BaseModel):
    """Whether the baseline is run, and the estimate that decided it, if any did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: bool
    seconds: float | None = None  # that the baseline's runs train, all together
    others_seconds: float | None = None  # that the other runs took


NONE = Decision(run=False)


def decide(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], seeds: int, minutes: float | None = None
) -> Decision | None:
    """Whether the baseline is run unasked: if it trains for at most a quarter of the time that the other runs took.

    A machine alone computes what all of them share otherwise, so seconds = seeds · machines · computing, where
    computing = train_seconds · (1 − waiting_share) is that of a rank of data_parallel, else of the median strategy; no
    run is longer than `minutes`. `runs` has the summaries of finished runs by strategy; None if there are none.

    >>> run = {"ranks": 4, "nodes": 2, "seconds": 50.0, "train_seconds": 40.0, "waiting_share": 0.75}
    >>> decide({"data_parallel": [run, run], "diloco": [run, run]}, seeds=2)
    Decision(run=True, seconds=40.0, others_seconds=200.0)
    >>> decide({"data_parallel": [run, run]}, seeds=2)
    Decision(run=False, seconds=40.0, others_seconds=100.0)
    """
    computing = {
        spec: statistics.fmean(one["train_seconds"] * (1 - one["waiting_share"]) for one in finished)
        for spec, finished in runs.items()
        if finished
    }
    if not computing:
        return None
    every = [one for finished in runs.values() for one in finished]
    machines = every[0]["nodes"] if every[0]["nodes"] > 1 else every[0]["ranks"]
    longest = float("inf") if minutes is None else 60 * minutes
    seconds = seeds * min(longest, machines * computing.get(REFERENCE, statistics.median(computing.values())))
    others = sum(one["seconds"] for one in every)
    return Decision(run=seconds <= SHARE * others, seconds=seconds, others_seconds=others)


def at_first(config: CompareConfig, specs: Sequence[str], before: Decision | None) -> Decision | None:
    """What is known when a comparison begins, or goes on; None if it is to be decided when the other runs are done."""
    ranks = config.ranks or 1
    nodes = config.nodes or (ranks if config.link is not None else 1)
    if config.baseline == "none" or SPEC in specs:
        return NONE
    if config.baseline == "auto":
        return before if ranks > 1 and ranks % nodes == 0 else NONE
    if ranks == 1:
        raise UsageError("--baseline alone is about several ranks, and there is one; try --ranks 4")
    if ranks % nodes:
        raise UsageError(
            f"--baseline alone needs as many ranks on every node, and {nodes} nodes share {ranks}; "
            f"try --ranks {ranks + -ranks % nodes}, or --baseline none"
        )
    return Decision(run=True)


def failed_unasked(errors: str, resume: str) -> str:
    """What is said where a baseline that `auto` decided on has failed."""
    return (
        "one machine alone, the baseline that nobody asked for, failed, and the other runs are not affected:\n"
        f"{errors}\nto try it again: {resume}; to go without it: {resume} --baseline none"
    )


def left_out(decision: Decision, resume: str) -> str:
    """What is said of a baseline that would cost too much; `resume` is the command that goes on with the comparison."""
    assert decision.seconds is not None
    assert decision.others_seconds is not None
    return (
        f"one machine alone, as a baseline, would train for about {format_seconds(decision.seconds)}, more than a "
        f"quarter of what the other runs took ({format_seconds(decision.others_seconds)}), so it is left out; to run "
        f"it: {resume} --baseline alone"
    )
