"""The curves of a plan: seconds an epoch takes with each strategy, against the speed of the link and against ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from thinwire.advice.crossings import Range, fastest_ranges, sentence
from thinwire.advice.plan import Plan
from thinwire.advice.ranking import safe, wire_for
from thinwire.comm.world import place
from thinwire.config import PlanConfig
from thinwire.errors import ThinwireError
from thinwire.netlab.link import Link
from thinwire.plan.planner import Forecast, Study, study_elsewhere

RATES = [10 ** (i / 5) for i in range(26)]  # Mbit/s, from 1 Mbit/s to 100 Gbit/s
ROUNDS = (0, 2, 3, 1, 4)  # of each five rates; the first round is always computed, the others while there is time
MOST_RANKS = 64
MOST_SECONDS = 45.0  # for the curves of either figure, if that suffices for the first round

Say = Callable[[str], None]


def _silent(text: str) -> None:
    pass


class RateCurves:
    """Forecasts of studied strategies at any speed of the link, each made once."""

    def __init__(self, studies: Sequence[Study], forecast: Callable[[Study, float], Forecast]) -> None:
        self.studies = {one.spec: one for one in studies}
        self.specs = list(self.studies)
        self.rates: list[float] = []
        self._forecast = forecast
        self._known: dict[tuple[str, float], Forecast] = {}

    def at(self, spec: str, rate: float) -> Forecast:
        """A strategy at a speed."""
        key = spec, rate
        if key not in self._known:
            self._known[key] = self._forecast(self.studies[spec], rate)
        return self._known[key]

    def times(self, rate: float, specs: Collection[str]) -> dict[str, float]:
        """Seconds per epoch of some strategies."""
        return {spec: self.at(spec, rate).seconds_per_epoch for spec in specs}

    def draw(self, most_seconds: float = MOST_SECONDS, say: Say = _silent) -> None:
        """Compute as many points as there is time for, evenly spread."""
        begin = time.monotonic()
        for number, part in enumerate(ROUNDS):
            for rate in RATES[part :: len(ROUNDS)]:
                if number == 0 or time.monotonic() - begin < most_seconds:
                    self.times(rate, self.specs)
                    self.rates = sorted([*self.rates, rate])
            if number == 0:
                left = min(most_seconds, (time.monotonic() - begin) * (len(RATES) / len(self.rates) - 1))
                say(f"curves: {len(self.specs)} strategies at up to {len(RATES)} link speeds (about {left:.0f} s)")

    def as_json(self) -> dict[str, Any]:
        """Rates and seconds."""
        seconds = {spec: [self.at(spec, rate).seconds_per_epoch for rate in self.rates] for spec in self.specs}
        return {"rates_mbit": self.rates, "seconds_per_epoch": seconds}


def rate_curves(plan: Plan, most_seconds: float = MOST_SECONDS, say: Say = _silent) -> RateCurves:
    """The curves of a plan, with the latency of its first link; strategies are in the order of that link's ranking."""
    latency = plan.links[0].latency_ms
    by_spec = {one.spec: one for one in plan.studies}
    studies = [by_spec[option.forecast.strategy] for option in plan.options[0]]
    curves = RateCurves(
        studies, lambda study, rate: study.forecast(wire_for(Link(rate, latency), plan.config, plan.machine))
    )
    curves.draw(most_seconds, say)
    return curves


class Crossings(NamedTuple):
    """The fastest strategies by the speed of the link, of all or of those that keep the accuracy."""

    among: str  # "all" or "safe"
    strategies: list[str]
    ranges: list[Range]

    def as_json(self) -> dict[str, Any]:
        ranges = [one._asdict() for one in self.ranges]
        return {"among": self.among, "strategies": self.strategies, "ranges": ranges, "sentence": sentence(self.ranges)}


def crossings(plan: Plan, curves: RateCurves) -> list[Crossings]:
    """The ranges among all strategies, and among those that were measured to keep the accuracy."""
    kept = [option.forecast.strategy for option in safe(plan.options[0])]
    groups = {"all": curves.specs, "safe": [spec for spec in curves.specs if spec in kept]}
    return [Crossings(among, s, fastest_ranges(curves.times, curves.rates, s)) for among, s in groups.items()]


class RankCurves(NamedTuple):
    """Forecasts by strategy and number of ranks on a link; `left_out` has the reason where there is none."""

    link: Link
    nodes: dict[int, int]  # by ranks
    forecasts: dict[str, dict[int, Forecast]]
    left_out: dict[str, dict[int, str]]

    def as_json(self) -> dict[str, Any]:
        ranks = list(self.nodes)
        seconds = {
            spec: [found[count].seconds_per_epoch if count in found else None for count in ranks]
            for spec, found in self.forecasts.items()
        }
        return {
            "link": str(self.link), "ranks": ranks, "nodes": list(self.nodes.values()), "seconds_per_epoch": seconds,
            "left_out": self.left_out,
        }  # fmt: skip


def rank_curves(plan: Plan, specs: Sequence[str], most_seconds: float = MOST_SECONDS, say: Say = _silent) -> RankCurves:
    """Study the strategies on other numbers of ranks, each as long as its share of the time lasts; small ones first."""
    config, link, end = plan.config, plan.links[0], time.monotonic() + most_seconds
    wire, studies = wire_for(link, config, plan.machine), {one.spec: one for one in plan.studies}
    nodes = node_counts(config, len(plan.workload.task.train) // plan.workload.batch_size)
    found = RankCurves(link, nodes, {spec: {} for spec in specs}, {})
    near_first = sorted(nodes, key=lambda count: abs(math.log2(count / config.ranks)))
    say(f"curves: {len(specs)} strategies on up to {len(nodes)} numbers of ranks (about {most_seconds:.0f} s at most)")
    for number, spec in enumerate(sorted(specs, key=lambda spec: _size(studies[spec]))):
        own_end = time.monotonic() + (end - time.monotonic()) / (len(specs) - number)
        for count in near_first:
            one = studies[spec]
            try:
                if count != config.ranks:
                    if time.monotonic() > own_end:
                        raise ThinwireError("not computed: the time for curves was over")
                    one = study_elsewhere(one, plan.workload, place(count, nodes[count]))
                found.forecasts[spec][count] = one.forecast(wire)
            except (ThinwireError, RuntimeError) as error:  # torch's, where parts of a model have no elements
                found.left_out.setdefault(spec, {})[count] = str(error)
    return found


def _size(one: Study) -> int:
    """Events of all recorded ranks: what has more of them takes longer to record and to replay."""
    traces = one.recorded.traces.values()
    return sum(len(trace.events) + sum(len(task.events) for task in trace.tasks) for trace in traces)


def node_counts(config: PlanConfig, most: int) -> dict[int, int]:
    """Numbers of ranks to draw, each with its nodes: powers of two that have as many ranks on a node as the plan has.

    `most` is the number of ranks that get a full batch of samples.

    >>> node_counts(PlanConfig(ranks=8, nodes=2), most=40)
    {4: 1, 8: 2, 16: 4, 32: 8}
    """
    nodes = config.nodes or config.ranks
    powers = [2**k for k in range(1, int(math.log2(MOST_RANKS)) + 1)]
    fitting = {count for count in powers if count * nodes % config.ranks == 0 and count <= most}
    return {count: count * nodes // config.ranks for count in sorted(fitting | {config.ranks})}
