"""What doctor recommends: the plan's choice for a task, on the network that was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from thinwire.advice.diagnosis import Diagnosis
from thinwire.advice.findings import Finding
from thinwire.advice.plan import make_plan
from thinwire.advice.ranking import LOSS_ALLOWED, chosen
from thinwire.config import PlanConfig
from thinwire.errors import ThinwireError


def with_recommendation(found: Diagnosis, task: str | None, model: str | None, data: Path | None) -> Diagnosis:
    """A diagnosis that also says which strategy to take, if a task or a model is named."""
    if task is None and model is None:
        return found
    return replace(found, findings=[*found.findings, recommend(found, task or "digits", model, data)])


def recommend(found: Diagnosis, task: str, model: str | None, data: Path | None) -> Finding:
    """The strategy to take on the examined world; a note that there is none if no network was measured."""
    ring = found.measured.ring if found.measured is not None else None
    if ring is None or len(found.facts) < 2:
        return Finding(
            "note", "strategy", "none", "No network was measured, so strategies cannot be compared.",
            "Start doctor on several ranks, or ask for any network: thinwire plan --link 100mbit.",
        )  # fmt: skip
    config = PlanConfig(
        task=task, model=model, data=data, ranks=len(found.facts), nodes=found.num_nodes,
        link=[f"{ring.rate_mbit:.6f}mbit,{ring.latency_ms:.6f}ms"], here=found.launcher == "thinwire",
    )  # fmt: skip
    if found.num_nodes == 1:
        return Finding(
            "note", "strategy", "data_parallel", "All ranks are on one node, so there is no link to save bytes on.",
            "If a node's ranks wait for each other, --strategy auto measures that when a run begins.",
        )  # fmt: skip
    try:
        options = make_plan([], config).options[0]
    except ThinwireError as error:
        return Finding("warning", "strategy", "none", f"No plan could be made: {error}.", "Try thinwire plan.")
    best, safe = options[0], chosen(options)
    faster = f" Faster, but not measured to keep the accuracy: {best.forecast.strategy}." if best is not safe else ""
    safe = safe or best
    return Finding(
        "note", "strategy", safe.forecast.strategy,
        f"For {task} on this network it is the fastest that lost at most {LOSS_ALLOWED} points where it was measured: "
        f"it {safe.why.partition(';')[0]}, and an epoch takes {safe.forecast.seconds_per_epoch:.3g} s.{faster}",
        "thinwire plan shows all strategies; --strategy auto chooses when a run begins.",
    )  # fmt: skip
