"""The user's own finished runs beside a plan: seconds per epoch that were predicted, and that were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from thinwire.advice.plan import Plan
from thinwire.advice.ranking import wire_for
from thinwire.compare.files import read_summary
from thinwire.errors import UsageError
from thinwire.netlab.link import Link, parse_link
from thinwire.spec import parse

SAME_LATENCY = 0.2  # share of the curves' latency, or ms, by which a run's may differ


class OwnRun(NamedTuple):
    """A finished run of a strategy of the plan: on the curve, if its latency is that of the curves."""

    strategy: str
    folder: str
    seed: int
    rate_mbit: float
    latency_ms: float
    predicted: float  # seconds per epoch
    measured: float
    is_on_curve: bool
    is_on_hosts: bool  # of one machine, with a link that was made for the run

    def as_json(self) -> dict[str, Any]:
        shown = self._asdict()
        predicted, measured = shown.pop("predicted"), shown.pop("measured")
        return {
            **shown, "predicted_seconds_per_epoch": predicted, "measured_seconds_per_epoch": measured,
            "predicted_over_measured": predicted / measured,
        }  # fmt: skip


class OwnRuns(NamedTuple):
    """The runs that a plan can be held against, and how many others were left out, by the reason."""

    runs: list[OwnRun]
    left_out: dict[str, int]


def own_runs(plan: Plan) -> OwnRuns:
    """The runs in the folder of --from that have the plan's task, model, ranks and nodes."""
    folder = plan.config.own_runs
    found = OwnRuns([], {})
    for path in sorted(folder.glob("**/summary.json")) if folder is not None else []:
        assert folder is not None
        try:
            found.runs.append(_run(plan, read_summary(path), path.parent.relative_to(folder)))
        except _OtherRun as other:
            found.left_out[str(other)] = found.left_out.get(str(other), 0) + 1
    return found


class _OtherRun(Exception):
    """Why a run cannot be compared with the plan."""


def _run(plan: Plan, summary: dict[str, Any], place: Path) -> OwnRun:
    config = plan.config
    wanted = {
        "task": config.task, "model": _spec(plan.workload.config.model or config.task), "ranks": config.ranks,
        "nodes": config.nodes or config.ranks,
    }  # fmt: skip
    shown = {**summary, "model": _spec(summary.get("model") or summary["task"])}
    for key, value in wanted.items():
        if shown[key] != value:
            raise _OtherRun(f"another {key}" if isinstance(value, str) else f"another number of {key}")
    study = next((one for one in plan.studies if one.spec == _spec(summary["strategy"])), None)
    if study is None:
        raise _OtherRun("a strategy that is not in the plan")
    if not summary["epochs"] or not summary["train_seconds"]:
        raise _OtherRun("no epoch was trained")
    steps = round(summary["steps"] / summary["epochs"], 2)
    if steps != study.steps_per_epoch:
        raise _OtherRun(f"{steps:g} steps an epoch, and the plan has {study.steps_per_epoch}: another batch size")
    link = _link(summary)
    forecast = study.forecast(wire_for(link, config, plan.machine))
    latency = plan.links[0].latency_ms
    return OwnRun(
        study.spec, str(place), summary["seed"], *link, forecast.seconds_per_epoch,
        summary["train_seconds"] / summary["epochs"],
        abs(link.latency_ms - latency) <= SAME_LATENCY * max(1.0, latency), summary.get("link_state") == "shaped",
    )  # fmt: skip


def _link(summary: dict[str, Any]) -> Link:
    """The link that a run had: with the rate that was measured, if it was, and the latency that was asked for."""
    asked = parse_link(summary["link"]) if summary.get("link") and summary.get("link_state") == "shaped" else None
    measured = summary.get("link_measured")
    if measured:
        return Link(measured["rate_mbit"], asked.latency_ms if asked else measured["latency_ms"])
    if asked:
        return asked
    raise _OtherRun("the speed of its link is not known")


def _spec(text: str) -> str:
    try:
        return str(parse(text))
    except UsageError:  # the name of a user's own model
        return text
