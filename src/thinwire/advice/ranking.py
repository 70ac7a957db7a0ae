"""Options of a plan, ranked by their time, each with a sentence that says why it is where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.advice.plan import Option
from thinwire.config import PlanConfig
from thinwire.netlab.link import Link
from thinwire.plan.machine import Machine
from thinwire.plan.measured import Quality, is_safe, qualities
from thinwire.plan.planner import Forecast, Study
from thinwire.plan.wire import Frames, Wire, lab_frames

NETWORK_BOUND, COMPUTE_BOUND = 0.5, 0.1  # shares of waiting
LOSS_ALLOWED = 0.5  # points of accuracy
SAME = 1.02  # times that differ by less are the same


def wire_for(link: Link, config: PlanConfig, machine: Machine) -> Wire:
    """The network of a plan: real nodes that are like this machine, or hosts on it."""
    frames = lab_frames(link, link.latency_ms > 0) if config.here else Frames()
    return Wire(
        link, frames, machine.cores, config.here, hop_seconds=machine.hop_seconds,
        busy_hop_seconds=machine.busy_hop_seconds, slowdown=machine.slowdown,
    )  # fmt: skip


def ranked(
    studies: Sequence[Study],
    link: Link,
    wire: Wire,
    optimizer: str = "",
    own: Mapping[str, list[Quality]] | None = None,
    updates: float | None = None,
) -> list[Option]:
    """The options on a link, the fastest first, with what was measured of them in such runs."""
    forecasts = sorted((one.forecast(wire) for one in studies), key=lambda f: f.seconds_per_step)
    return [Option(link, f, qualities(f.strategy, optimizer, own, updates), _why(f, forecasts)) for f in forecasts]


def chosen(options: Sequence[Option], loss_allowed: float = LOSS_ALLOWED) -> Option | None:
    """The fastest option that is exact, or that lost no more than allowed wherever it was measured."""
    return next(iter(safe(options, loss_allowed)), None)


def safe(options: Sequence[Option], loss_allowed: float = LOSS_ALLOWED) -> list[Option]:
    """The options that are exact, or that lost no more than allowed wherever they were measured."""
    return [one for one in options if is_safe(one.forecast.strategy, one.measured, loss_allowed)]


def _why(forecast: Forecast, forecasts: Sequence[Forecast]) -> str:
    """One sentence: how long it waits, and what would be better, or that nothing would."""
    best = forecasts[0]
    if forecast.waiting_share < COMPUTE_BOUND:
        waits = f"computes most of the time and waits {forecast.waiting_share:.0%}"
    else:
        waits = f"waits {forecast.waiting_share:.0%} of the time for the network"
    if forecast is best:
        others = [f for f in forecasts if f is not best]
        plain = next((f for f in others if f.strategy == "data_parallel"), None)
        if plain is not None and plain.seconds_per_step < SAME * best.seconds_per_step:
            return f"{waits}; data_parallel is as fast, and exact: take that"
        return f"{waits}; nothing else here is faster"
    ratio = forecast.seconds_per_step / best.seconds_per_step
    if ratio < SAME:
        return f"{waits}; as fast as the fastest"
    return f"{waits}; {best.strategy} would wait {best.waiting_share:.0%} and be {ratio:.3g} times as fast"
