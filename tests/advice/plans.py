"""Plans for tests: one of real strategies on a small task, and one of strategies whose times are formulas."""

from __future__ import annotations

from functools import cache
from typing import Any

from thinwire.advice.curves import Crossings, RankCurves, RateCurves
from thinwire.advice.own_runs import OwnRun, OwnRuns
from thinwire.advice.plan import Option, Plan, load_workload
from thinwire.advice.plan_data import Pictured
from thinwire.advice.ranking import ranked, wire_for
from thinwire.comm.world import place
from thinwire.config import PlanConfig
from thinwire.netlab.link import Link, parse_link
from thinwire.plan.machine import Machine
from thinwire.plan.measured import Quality
from thinwire.plan.planner import Forecast, study

LINK = Link(100.0)
MACHINE = Machine(2, (1.0, 1.1))
SPECS = ["data_parallel", "diloco", "data_parallel(reducer=maxnorm(bits=4))"]
ABOUT: dict[str, Any] = {
    "parameters": 85_002, "flops_per_step": 7.6e6, "is_timed": True, "flops_per_second": 9.9e10, "cores": 2,
    "slowdown": 1.1,
}  # fmt: skip


@cache
def real_plan() -> Plan:
    """Some strategies on digits, timed for a moment."""
    config = PlanConfig(task="digits", ranks=2, epochs=3, link=["100mbit", "10gbit"])
    workload = load_workload(config)
    studies = [study(spec, workload, place(2, 2), seconds=0.05) for spec in SPECS]
    links = [parse_link(text) for text in config.link]
    options = [ranked(studies, link, wire_for(link, config, MACHINE), "sgd") for link in links]
    return Plan(config, ABOUT, links, options, {}, studies, workload, MACHINE)


def forecast(spec: str, seconds: float) -> Forecast:
    return Forecast(spec, seconds / 20, seconds, 0.5, 1e5, 1.1e5, 2e5, 10**7)


def made_curves(**formulas: tuple[float, float]) -> RateCurves:
    """Strategies whose epochs take a + b / rate seconds, by their a and b."""

    class Study:
        def __init__(self, spec: str) -> None:
            self.spec = spec

    def seconds(one: Any, rate: float) -> Forecast:
        a, b = formulas[one.spec]
        return forecast(one.spec, a + b / rate)

    curves = RateCurves([Study(spec) for spec in formulas], seconds)  # type: ignore[misc]
    curves.draw()
    return curves


def made_plan(specs: list[str], measured: list[Quality], link: Link = LINK) -> Plan:
    """A plan in which all strategies take two seconds an epoch, and for all of which the same was measured."""
    options = [Option(link, forecast(spec, 2.0), measured, "waits") for spec in specs]
    return Plan(PlanConfig(), ABOUT, [link], [options])


def nasty_page(nasty: str) -> Pictured:
    """A plan with a text wherever users, or what they give, can put one."""
    config, link = PlanConfig(task=nasty), Link(100)
    specs = ["data_parallel", f"local_sgd(reducer={nasty!r})"]
    qualities = [Quality(-1.0, 2, nasty)]
    options = [Option(link, forecast(spec, 2.0), qualities, nasty) for spec in specs]
    plan = Plan(config, ABOUT, [link], [options], {nasty: nasty})
    about = {
        **ABOUT, "task": nasty, "model": nasty, "ranks": 4, "nodes": 4, "batch_size": 16, "here": False,
        "compute": nasty, "processor": nasty, "versions": {nasty: nasty},
    }  # fmt: skip
    rates = made_curves(**dict.fromkeys(specs, (1.0, 2.0)))
    ranks = RankCurves(link, {4: 4}, {spec: {4: forecast(spec, 2.0)} for spec in specs}, {specs[0]: {8: nasty}})
    runs = OwnRuns([OwnRun(specs[1], nasty, 0, 90.0, 0.0, 1.0, 1.1, True, True)], {nasty: 1})
    return Pictured(plan, about, rates, ranks, [Crossings("all", specs, []), Crossings("safe", [], [])], runs)
