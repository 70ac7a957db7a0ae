"""A plan with all that its page shows and plan.json holds: curves, crossings, the user's runs, and the machine."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.advice.curves import Crossings, RankCurves, RateCurves, crossings, rank_curves, rate_curves
from thinwire.advice.own_runs import OwnRuns, own_runs
from thinwire.advice.plan import Plan


class Pictured(NamedTuple):
    """A plan with all that its page shows."""

    plan: Plan
    about: dict[str, Any]
    rates: RateCurves
    ranks: RankCurves
    crossings: list[Crossings]
    own: OwnRuns

    def as_json(self) -> dict[str, Any]:
        """What plan.json holds."""
        latency = {"latency_ms": self.plan.links[0].latency_ms}
        return {
            "options": self.plan.as_json(),
            "curves": {"rate": {**latency, **self.rates.as_json()}, "ranks": self.ranks.as_json()},
            "crossings": [one.as_json() for one in self.crossings],
            "measured_runs": [run.as_json() for run in self.own.runs],
            "left_out": self.plan.left_out,
            "about": self.about,
        }


def pictured(plan: Plan, say: Callable[[str], None] = lambda text: None) -> Pictured:
    """Compute what the page shows besides the plan."""
    rates = rate_curves(plan, say=say)
    ranks = rank_curves(plan, rates.specs, say=say)
    return Pictured(plan, about(plan), rates, ranks, crossings(plan, rates), own_runs(plan))


def about(plan: Plan) -> dict[str, Any]:
    """What was planned, and on which machine it was measured."""
    from torch import device

    from thinwire.run.summary import versions

    config, settings = plan.config, plan.workload.config
    return {
        "task": config.task, "model": settings.model or config.task, "ranks": config.ranks,
        "nodes": config.nodes or config.ranks, "links": [str(link) for link in plan.links], "here": config.here,
        "epochs": plan.workload.epochs, "batch_size": plan.workload.batch_size, "optimizer": settings.optimizer,
        "accumulate": config.accumulate, "autocast": config.autocast, "compute": config.compute, **plan.about,
        "processor": _processor(), "versions": versions(device("cpu")),
    }  # fmt: skip


def _processor() -> str:
    """The name of this machine's processor."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()
