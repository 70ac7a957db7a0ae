"""report.html: one page with a comparison's table and figures, complete in itself and readable offline."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from thinwire.common.files import write_text
from thinwire.common.formats import format_metric, format_seconds
from thinwire.compare.report import figures
from thinwire.compare.report.definitions import DEFINITIONS
from thinwire.compare.report.figures import PURPOSES
from thinwire.compare.report.marks import GREY, Figure
from thinwire.compare.report.notes import all_records, all_summaries, measured_link, notes
from thinwire.compare.report.series import declared_series, series_figures
from thinwire.compare.report.table import artifacts_of, results_table
from thinwire.compare.report.timeline import KINDS, timeline
from thinwire.compare.report.words import breakable, code, counted, listed, spec_of
from thinwire.compare.results import Entry, Record, Results
from thinwire.compare.verdicts import remarks, verdicts

LIGHT = {"page": "#ffffff", "text": "#1d2126", "muted": "#59626d", "line": "#dde1e6", "panel": "#f5f6f8",
         "note": "#fff6e3", "edge": "#c98a0a"}  # fmt: skip
DARK = {"page": "#14171b", "text": "#e4e8ec", "muted": "#9da7b3", "line": "#30363e", "panel": "#1c2026",
        "note": "#2a2416", "edge": "#b98612"}  # fmt: skip
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath "
    "d='M1 11h4l2-7 3 9 2-5h3' fill='none' stroke='%232f78c4' stroke-width='1.8'/%3E%3C/svg%3E"
)


def write_report(results: Results, path: Path | None = None) -> Path:
    """Write the page, by default as report.html in the results' folder, and say where it is."""
    path = path or results.folder / "report.html"
    write_text(path, page(results))
    return path


def page(results: Results) -> str:
    """The whole page as HTML."""
    from plotly.offline import get_plotlyjs

    drawn: list[Figure] = []
    body = [_intro(results), notes(results)]
    if results.example:
        body[1:1] = [_verdicts(results)]
        body += [results_table(results), _figures(results, drawn), _series(results, drawn), _timelines(results, drawn)]
    body += [_repeat(results), _definitions(results)]
    scripts = [_script(get_plotlyjs()), _data(drawn)] if drawn else []
    scripts += [_script(_file("script.js"))] if results.example else []
    return "\n".join([_head(_title(results)), *body, "</main>", *scripts, "</body></html>", ""])


def _head(title: str) -> str:
    light, dark = ("".join(f"--{name}:{value};" for name, value in look.items()) for look in (LIGHT, DARK))
    looks = f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · thinwire</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="{ICON}">
<style>{looks}
{_file("style.css")}</style></head><body><main>"""


def _title(results: Results) -> str:
    what = results.entries[0].spec if len(results.entries) == 1 else f"{len(results.entries)} strategies"
    return f"{what} on {results.example['task']}" if results.example else what


def _intro(results: Results) -> str:
    about = results.example
    heading = f"<h1>{breakable(_title(results))}</h1>"
    if about is None:
        return f"{heading}<p>No run has finished, so there is nothing to compare yet.</p>"
    seeds = sorted({record.seed for entry in results.entries for record in entry.records})
    model = f" with model {code(about['model'])}" if about.get("model") not in (None, about["task"]) else ""
    ranks = counted(about["ranks"], "rank")
    nodes = f" on {counted(about['nodes'], 'node')}" if about["ranks"] > 1 else ""
    link = f"link {code(about['link'])}" if about["link"] else "no link shaped between them"
    settings = [f"{ranks}{nodes}", *([link] if about["ranks"] > 1 or about["link"] else [])]
    settings += [f"seed{'s' * (len(seeds) > 1)} {listed(seeds)}", _epochs(all_summaries(results))]
    what = "Strategies compared" if len(results.entries) > 1 else "One strategy"
    return f'{heading}<p class="lead">{what} on task {code(about["task"])}{model}: {", ".join(settings)}.</p>'


def _verdicts(results: Results) -> str:
    """Each strategy in a sentence, and what must be said of all."""
    said = "".join(
        f"<li>{spec_of(i, results.entries[i])} <span>{escape(words)}</span></li>"
        for i, words in verdicts(results).items()
    )
    plain = "".join(f'<p class="remark">{escape(words)}</p>' for words in remarks(results))
    return (f'<h2 class="first">In short</h2><ul class="verdicts">{said}</ul>' if said else "") + plain


def _epochs(summaries: list[dict[str, Any]]) -> str:
    """How long the runs were: the same for all, unless a budget of time ended them."""
    fewest, most = min(s["epochs"] for s in summaries), max(s["epochs"] for s in summaries)
    return (
        f"{counted(most, 'epoch')} each"
        if fewest == most
        else f"{counted(fewest, 'epoch')} to {counted(most, 'epoch')}"
    )


def _figures(results: Results, drawn: list[Figure]) -> str:
    time, sent = figures.curves(results, "train_seconds"), figures.curves(results, "bytes")
    purposes = figures.purposes(results)
    parts = {part for entry in results.entries for part in figures.purpose_bytes(entry)}
    shades = [(f"{purpose}, {where} nodes", PURPOSES.get(purpose, GREY), where == "inside")
              for purpose, where in sorted(parts, key=figures.purpose_order)]  # fmt: skip
    return "\n".join(
        [
            f"<section><h2>{escape(results.metric).capitalize()} during training</h2>",
            f'{_scale(time or sent)}{_key(results)}<div class="pair">',
            _figure(time, drawn, "No evaluation was recorded, so there is nothing to draw over time."),
            _figure(sent, drawn, "No bytes were recorded over time, so there is nothing to draw."),
            "</div></section>",
            _costs(results, drawn) if len(results.entries) > 1 else "",
            "<section><h2>What the bytes were for</h2>",
            _plot(purposes, drawn, _shades(shades)) if purposes else '<p class="none">No bytes were recorded.</p>',
            "</section>",
        ]
    )


def _costs(results: Results, drawn: list[Figure]) -> str:
    sent, time = figures.front(results, "bytes"), figures.front(results, "train_seconds")
    return (
        f"<section><h2>Final {escape(results.metric)} and its cost</h2>{_scale(sent or time)}"
        + f'{_key(results)}<div class="pair">'
        + _figure(sent, drawn, "Nothing was sent, so there are no bytes to compare.")
        + _figure(time, drawn, "No training time was recorded.")
        + "</div></section>"
    )


def _scale(figure: Figure | None) -> str:
    """What a reader must know of the vertical axis that the figures of a section share."""
    return f"<p>{escape(figure.scale)}</p>" if figure and figure.scale else ""


def _series(results: Results, drawn: list[Figure]) -> str:
    """A section for each series that strategies declare and that has something to draw."""
    sections = []
    for name, series in declared_series(results).items():
        if found := list(series_figures(name, results)):
            sections.append(_folds(series.title, f"<p>{escape(series.about)}</p>", found, drawn))
    return "\n".join(sections)


def _timelines(results: Results, drawn: list[Figure]) -> str:
    found = [(i, e, f) for i, e in enumerate(results.entries) if (f := timeline(i, e))]
    if not found:
        return "<h2>Timeline</h2><p>No timeline was recorded.</p>"
    shades = [("computing", KINDS["computing"], False), ("waiting for the network", KINDS["waiting"], False),
              ("on the wire", KINDS["communication"], False)]  # fmt: skip
    words = (
        "A few steps of each rank. The upper bar is the computing thread, the lower one what was on the wire "
        "meanwhile: blue below grey is communication hidden behind computing. Each strategy has its own time scale."
    )
    return _folds("Timeline", f"<p>{words}</p>{_shades(shades)}", found, drawn, _waiting)


def _waiting(entry: Entry) -> str:
    waiting = entry.spread("waiting_share")
    return f' <span class="sub">waiting {100 * waiting.mean:.1f} % on average</span>' if waiting else ""


def _folds(
    title: str, intro: str, found: list[tuple[int, Entry, Figure]], drawn: list[Figure],
    more: Callable[[Entry], str] = lambda entry: "",
) -> str:  # fmt: skip
    """A section with a figure for each strategy; all but the first are folded away."""
    first, *rest = (
        f"<summary>{spec_of(i, entry)}{more(entry)}</summary>{_plot(figure, drawn)}</details>"
        for i, entry, figure in found
    )
    folded = "".join(f"<details>{part}" for part in rest)
    return f"<section><h2>{title}</h2>{intro}<details open>{first}</section>{folded}"


def _figure(figure: Figure | None, drawn: list[Figure], otherwise: str) -> str:
    if figure is None:
        return f'<p class="none">{otherwise}</p>'
    return f"<figure><h3>{escape(figure.title)}</h3>{_plot(figure, drawn)}</figure>"


def _plot(figure: Figure, drawn: list[Figure], key: str = "") -> str:
    drawn.append(figure)
    label = f"{figure.title}. {figure.reading}"
    return (
        f'<p class="reading">{escape(figure.reading)}</p>{key}<div class="plot" id="{figure.name}" role="img" '
        f'aria-label="{escape(label)}" style="height:{figure.layout["height"]}px"></div>'
    )


def _key(results: Results) -> str:
    """Strategies by colour and number; a press hides or shows one in all figures."""
    items = "".join(
        f'<button type="button" aria-pressed="true" data-strategy="{i}">{spec_of(i, entry)}</button>'
        for i, entry in enumerate(results.entries)
        if entry.finished
    )
    return f'<div class="key" role="group" aria-label="Show or hide strategies">{items}</div>'


def _shades(shades: list[tuple[str, str, bool]]) -> str:
    items = "".join(
        f'<span><i class="{"hatched" if hatched else "full"}" style="--shade:{shade}"></i>{escape(words)}</span>'
        for words, shade, hatched in shades
    )
    return f'<div class="key shades">{items}</div>'


def _repeat(results: Results) -> str:
    about = results.example or {}
    versions = ", ".join(f"{escape(str(k))} {escape(str(v))}" for k, v in (about.get("versions") or {}).items())
    measured = measured_link(all_summaries(results))
    facts = {"Versions": versions or "not known"}
    if about.get("link"):
        facts["Link"] = f"{code(about['link'])} asked for" + (f"; measured {measured}" if measured else "")
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    runs = "".join(
        f"<li>{code(_place(results, r))} <span>{_outcome(r)}</span></li>" for _, _, r in all_records(results)
    )
    return f"""<h2>Repeat it</h2><pre><code>{escape(results.command)}</code></pre><dl class="facts">{listed}</dl>
<h3>Runs, in the folder of this page</h3><ul class="runs">{runs}</ul>"""


def _place(results: Results, record: Record) -> str:
    if record.folder == results.folder or not record.folder.is_relative_to(results.folder):
        return record.folder.name
    return str(record.folder.relative_to(results.folder))


def _outcome(record: Record) -> str:
    if record.summary is None:
        return "failed" if record.error else "not finished"
    value, seconds = (record.summary[key] for key in ("value", "train_seconds"))
    return f"{format_metric(value, record.summary['metric'])}, {format_seconds(seconds)}"


def _definitions(results: Results) -> str:
    own = {series.title: series.about for series in declared_series(results).values() if series.draw == "column"}
    for one in (one for entry in results.entries for one in artifacts_of(entry) if one["column"]):
        own[one["column"]] = (
            f"{one['about'][:1].upper()}{one['about'][1:]}: its size as saved, and how often its parameters go into "
            "those of the whole model."
        )
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in (DEFINITIONS | own).items())
    return f"<h2>How to read these figures</h2><dl>{items}</dl>"


def _data(drawn: list[Figure]) -> str:
    """Everything to draw, as JSON that cannot end its script early."""
    look = {"light": LIGHT, "dark": DARK}
    named = {figure.name: {"data": figure.data, "layout": figure.layout} for figure in drawn}
    text = json.dumps({"look": look, "figures": named}, separators=(",", ":"), allow_nan=False)
    return f'<script type="application/json" id="drawn">{text.replace("<", chr(92) + "u003c")}</script>'


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _script(code: str) -> str:
    return f"<script>{code}</script>"
