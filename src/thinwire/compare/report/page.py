"""report.html: one page with the tables and figures of a comparison, which needs no other file and no network.

The functions here prepare the data; the HTML is in templates/.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.common.files import write_text
from thinwire.common.formats import format_metric, format_seconds
from thinwire.compare.report.columns import artifacts_of
from thinwire.compare.report.costs import cost_of
from thinwire.compare.report.curves import learning_curves
from thinwire.compare.report.definitions import DEFINITIONS
from thinwire.compare.report.pareto import pareto_figure
from thinwire.compare.report.parts import part_rows
from thinwire.compare.report.purposes import purpose_colour, purpose_figure, purpose_parts
from thinwire.compare.report.render import render
from thinwire.compare.report.series import declared_series, series_figures
from thinwire.compare.report.shell import shell
from thinwire.compare.report.style import Figure
from thinwire.compare.report.table import results_table
from thinwire.compare.report.timeline import KINDS, timelines
from thinwire.compare.report.warnings import all_records, all_summaries, find_warnings, measured_link
from thinwire.compare.report.words import pluralize, strategy_name
from thinwire.compare.results import Entry, Record, Results
from thinwire.compare.verdicts import remarks, verdicts
from thinwire.run.tables import measured_words


class Colour(NamedTuple):
    """A colour of a figure's key."""

    meaning: str
    css: str
    is_hatched: bool = False


def write_report(results: Results, path: Path | None = None) -> Path:
    """Write the page, by default as report.html in the folder of the results, and return its path."""
    path = path or results.folder / "report.html"
    write_text(path, page(results))
    return path


def page(results: Results) -> str:
    """The whole page as HTML."""
    drawn: list[Figure] = []  # in the order of the page
    names = [strategy_name(i, entry) for i, entry in enumerate(results.entries)]
    data: dict[str, Any] = {
        "title": _title(results),
        "names": names,
        "about": results.example,
        "warnings": find_warnings(results),
        "definitions": DEFINITIONS | _own_definitions(results),
        "folders": [_about(name, part) for name, part in (results.parts or {"": results}).items()],
        "is_several": bool(results.parts),
        "runs": [{"place": _place(results, r), "outcome": _outcome(r)} for r in all_records(results)],
    }
    if results.example:
        data |= {
            "metric": results.metric,
            "finished": [name for name in names if results.entries[name.index].finished],
            "verdicts": verdicts(results),
            "remarks": remarks(results),
            "tables": results_table(results),
            **_figures(results, drawn),
            **_sequences(results),
            "series": _series(results, drawn),
            "timelines": _timelines(results, drawn),
        }
    return render("page.html", **data, **shell(drawn, has_script=bool(results.example)))


def _title(results: Results) -> str:
    number = len(results.entries)
    what = results.entries[0].name if number == 1 else f"{number} {'results' if results.parts else 'strategies'}"
    return f"{what} on {results.example['task']}" if results.example else what


def _about(name: str, part: Results) -> dict[str, Any]:
    """One folder: where and how long its runs trained, and how to repeat them.

    All its runs have the same number of epochs, unless a time limit ended them.
    """
    found = all_summaries(part)
    epochs = [summary["epochs"] for summary in found] or [0]
    fewest, most = pluralize(min(epochs), "epoch"), pluralize(max(epochs), "epoch")
    return {
        "name": name,
        "about": part.example,
        "seeds": sorted({record.seed for record in all_records(part)}),
        "epochs": f"{most} each" if fewest == most else f"{fewest} to {most}",
        "command": part.command,
        "versions": (part.example or {}).get("versions") or {},
        "measured": measured_link(found),
        "network": measured_words(found),
    }


def _figures(results: Results, drawn: list[Figure]) -> dict[str, Any]:
    """The figures of the comparison as a whole; None for those that have nothing to draw."""
    has_front = len(results.entries) > 1 and results.is_comparable
    figures = {
        "curve_time": learning_curves(results, "train_seconds"),
        "curve_bytes": learning_curves(results, "bytes"),
        "pareto_bytes": pareto_figure(results, "bytes") if has_front else None,
        "pareto_time": pareto_figure(results, "train_seconds") if has_front else None,
        "purposes": purpose_figure(results),
    }
    drawn += [figure for figure in figures.values() if figure]
    colours = [
        Colour(f"{purpose}, {where} nodes", purpose_colour(purpose), where == "inside")
        for purpose, where in purpose_parts(results)
    ]
    return {"figures": figures, "has_front": has_front, "purpose_colours": colours}


def _sequences(results: Results) -> dict[str, Any]:
    """The parts of each sequence, and what is counted of them."""
    found = [(strategy_name(i, e), rows) for i, e in enumerate(results.entries) if (rows := part_rows(results, e))]
    sent = cost_of(results, "bytes").name
    return {"sequences": found, "metric": results.metric, "sent": f"{sent[:1].upper()}{sent[1:]}"}


def _series(results: Results, drawn: list[Figure]) -> str:
    """A section for each series that strategies declare and that has something to draw."""
    sections = []
    for name, series in declared_series(results):
        if found := list(series_figures(name, series, results)):
            sections.append(_folds(series.title, f"<p>{escape(series.about)}</p>", found, drawn))
    return "\n".join(sections)


def _timelines(results: Results, drawn: list[Figure]) -> str:
    found = [(i, e, figure) for i, e in enumerate(results.entries) for figure in timelines(i, e)]
    if not found:
        return "<h2>Timeline</h2><p>No timeline was recorded.</p>"
    meanings = {"computing": "computing", "waiting": "waiting for the network", "communication": "communication"}
    colours = [Colour(meaning, KINDS[kind]) for kind, meaning in meanings.items()]
    return _folds("Timeline", render("timeline_intro.html", colours=colours), found, drawn, _part_and_waiting)


def _part_and_waiting(entry: Entry, figure: Figure) -> str:
    part = escape(figure.title.removeprefix(entry.name))
    waiting = entry.spread("waiting_share")
    return part + (f' <span class="sub">waiting {100 * waiting.mean:.1f} % on average</span>' if waiting else "")


def _folds(
    title: str, intro: str, found: list[tuple[int, Entry, Figure]], drawn: list[Figure],
    more: Callable[[Entry, Figure], str] = lambda entry, figure: "",
) -> str:  # fmt: skip
    """A section with a figure for each strategy, as HTML; all but the first are folded away.

    `intro` and `more`, which follows the name of a strategy, are HTML too.
    """
    drawn += [figure for _, _, figure in found]
    folds = [{"name": strategy_name(i, e), "more": more(e, figure), "figure": figure} for i, e, figure in found]
    return render("folds.html", title=title, intro=intro, folds=folds)


def _own_definitions(results: Results) -> dict[str, str]:
    """Definitions of the columns that strategies declare: of series, and of artifacts."""
    own = {series.title: series.about for _, series in declared_series(results) if series.draw == "column"}
    for one in (one for entry in results.entries for one in artifacts_of(entry) if one["column"]):
        own[one["column"]] = (
            f"{one['about'][:1].upper()}{one['about'][1:]}: its size as saved, and the parameters of the whole "
            "model divided by its own."
        )
    return own


def _place(results: Results, record: Record) -> str:
    if results.parts:
        return str(record.folder)
    if record.folder == results.folder or not record.folder.is_relative_to(results.folder):
        return record.folder.name
    return str(record.folder.relative_to(results.folder))


def _outcome(record: Record) -> str:
    if record.summary is None:
        return "failed" if record.error else "not finished"
    value, seconds = (record.summary[key] for key in ("value", "train_seconds"))
    return f"{format_metric(value, record.summary['metric'])}, {format_seconds(seconds)}"
