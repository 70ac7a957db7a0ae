"""One machine alone as a baseline of a comparison: whether it can be run, and whether it takes little time."""

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
MAX_SHARE = 0.25  # of the time of the other runs: an automatic baseline may not take more


class Decision(BaseModel):
    """Whether the baseline is run, and the estimate that this was decided by, if there was one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: bool
    seconds: float | None = None  # estimated training time of all runs of the baseline
    others_seconds: float | None = None  # time that the other runs took


NOT_RUN = Decision(run=False)


def decide(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], seeds: int, minutes: float | None = None
) -> Decision | None:
    """Decide whether the automatic baseline is run: if it trains for at most a quarter of the time of the other runs.

    One machine does alone the computing that all machines otherwise share, so seconds = seeds · machines · computing,
    where computing = train_seconds · (1 − waiting_share) is that of a rank of data_parallel, or without data_parallel
    that of the median strategy. No run takes longer than `minutes`. `runs` has the summaries of finished runs by
    strategy. None if no run has finished.

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
    return Decision(run=seconds <= MAX_SHARE * others, seconds=seconds, others_seconds=others)


def initial_decision(
    config: CompareConfig, specs: Sequence[str], saved: Decision | None, ranks_by_node: Sequence[int] | None = None
) -> Decision | None:
    """The decision before the runs; None if it depends on the time that they take.

    `saved` is the decision of a comparison that is resumed, `ranks_by_node` of the world that does the runs; without
    one, the config says how many ranks are started.
    """
    ranks = config.ranks or 1
    nodes = config.nodes or (ranks if config.link is not None else 1)
    if ranks_by_node is not None:
        ranks, nodes = sum(ranks_by_node), len(ranks_by_node)
    is_even = len(set(ranks_by_node)) == 1 if ranks_by_node else ranks % nodes == 0
    if config.baseline == "none" or SPEC in specs:
        return NOT_RUN
    if config.baseline == "auto":
        return saved if ranks > 1 and is_even else NOT_RUN
    if ranks == 1:
        raise UsageError("--baseline alone is about several ranks, and there is one; try --ranks 4")
    if not is_even and ranks_by_node is not None:
        counts = ", ".join(map(str, ranks_by_node))
        raise UsageError(
            f"--baseline alone needs as many ranks on every node, and these have {counts}; start as many on each, "
            "or give --baseline none"
        )
    if not is_even:
        raise UsageError(
            f"--baseline alone needs as many ranks on every node, and {nodes} nodes share {ranks}; "
            f"try --ranks {ranks + -ranks % nodes}, or --baseline none"
        )
    return Decision(run=True)


def failed_message(errors: str, resume: str) -> str:
    """The message if the automatic baseline failed; `resume` is the command that resumes the comparison."""
    return (
        "one machine alone, the automatic baseline, failed; the other runs are not affected:\n"
        f"{errors}\nto try it again: {resume}; to go without it: {resume} --baseline none"
    )


def left_out_message(decision: Decision, resume: str) -> str:
    """The message if the baseline would take too long; `resume` is the command that resumes the comparison."""
    assert decision.seconds is not None
    assert decision.others_seconds is not None
    return (
        f"one machine alone, as a baseline, would train for about {format_seconds(decision.seconds)}, more than a "
        f"quarter of what the other runs took ({format_seconds(decision.others_seconds)}), so it is left out; to run "
        f"it: {resume} --baseline alone"
    )
