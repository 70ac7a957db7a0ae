"""plan.html: the texts and tables of the page; its HTML is in templates/plan.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.advice.crossings import link_text, sentence
from thinwire.advice.own_runs import OwnRun
from thinwire.advice.plan import PAGE_MARK, Option
from thinwire.advice.plan_data import Pictured
from thinwire.advice.plan_figures import rank_figure, rate_figure
from thinwire.advice.plan_table import seconds_text
from thinwire.advice.ranking import LOSS_ALLOWED, chosen
from thinwire.common.formats import format_bytes
from thinwire.compare.report.columns import Cell
from thinwire.compare.report.render import render_from
from thinwire.compare.report.shell import shell
from thinwire.compare.report.table import Row, Table
from thinwire.compare.report.words import name_of
from thinwire.netlab.link import Link
from thinwire.plan.measured import REFERENCE

TEMPLATES = Path(__file__).parent / "templates"
HEADINGS = ["A step", "An epoch", "Waiting", "Sent a step, by ledger", "As Linux counts", "Between nodes, all ranks",
            "Memory", "Points of accuracy"]  # fmt: skip


def html_of(shown: Pictured) -> str:
    """The whole page."""
    plan, specs = shown.plan, shown.rates.specs
    figures = {"rates": rate_figure(shown.rates, plan.links, shown.own.runs), "ranks": rank_figure(shown.ranks)}
    frame = shell(list(figures.values()))
    frame["css"] += (TEMPLATES / "plan.css").read_text(encoding="utf-8")
    names = [name_of(i, spec) for i, spec in enumerate(specs)]
    measured = {option.forecast.strategy: option.measured for option in plan.options[0]}
    return render_from(
        TEMPLATES, "plan.html", title=f"Plan of {plan.config.task}", generator=PAGE_MARK, about=shown.about,
        names=names, links=[_link(link_text(link), options, specs) for link, options in
                            zip(plan.links, plan.options, strict=True)],
        figures=figures, loss_allowed=LOSS_ALLOWED, latency=plan.links[0].latency_ms,
        sentences={one.among: sentence(one.ranges) for one in shown.crossings},
        qualities=[(name, measured[name.spec]) for name in names if measured[name.spec]],
        runs=_runs(shown.own.runs, specs), runs_left_out=shown.own.left_out,
        runs_on_hosts=any(run.is_on_hosts for run in shown.own.runs) and not plan.config.here,
        left_out=plan.left_out, **frame,
    )  # fmt: skip


def _link(link: str, options: Sequence[Option], specs: Sequence[str]) -> dict[str, Any]:
    """What the page says of one link: the fastest strategies, and the table."""
    rows = [Row(name_of(specs.index(o.forecast.strategy), o.forecast.strategy), o.why, _cells(o)) for o in options]
    kept = chosen(options)
    return {
        "link": link,
        "fastest": rows[0].name,
        "why": options[0].why,
        "kept": None if kept is None else rows[options.index(kept)].name,
        "kept_why": "" if kept is None else kept.why,
        "table": Table(HEADINGS, rows),
    }


def _cells(option: Option) -> list[tuple[Cell, bool]]:
    f = option.forecast
    sent = (f.wire_bytes_per_step, f.kernel_bytes_per_step, f.between_bytes_per_step, f.memory_bytes)
    texts = [seconds_text(f.seconds_per_step), seconds_text(f.seconds_per_epoch), f"{f.waiting_share:.0%}"]
    texts += [format_bytes(round(count)) for count in sent]
    return [(cell, False) for cell in (*map(Cell, texts), _accuracy(option))]


def _accuracy(option: Option) -> Cell:
    """The points, from the worst to the best, and from how many measurements; those are named further down."""
    points = sorted(quality.points for quality in option.measured)
    if not points:
        return Cell("exact" if option.forecast.strategy == REFERENCE else "not measured")
    span = f"{points[0]:+.1f}" if len(points) == 1 else f"{points[0]:+.1f} to {points[-1]:+.1f}"
    number = "measured once" if len(points) == 1 else f"measured in {len(points)} settings"
    return Cell(span.replace("-", "−"), (number,))


def _runs(runs: Sequence[OwnRun], specs: Sequence[str]) -> Table | None:
    """Predicted and measured seconds side by side."""
    headings = ["Seed", "Link", "Predicted an epoch", "Measured an epoch", "Predicted / measured", "Folder"]
    rows = []
    for run in runs:
        texts = [str(run.seed), link_text(Link(run.rate_mbit, run.latency_ms)), seconds_text(run.predicted)]
        texts += [seconds_text(run.measured), f"{run.predicted / run.measured:.2f}", run.folder]
        remark = "" if run.is_on_curve else "another latency than the curves have, so not drawn"
        rows.append(Row(name_of(specs.index(run.strategy), run.strategy), remark, [(Cell(t), False) for t in texts]))
    return Table(headings, rows) if rows else None
