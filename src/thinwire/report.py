"""report.html: one page with a comparison's table and figures, complete in itself and readable offline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from thinwire import figures
from thinwire.figures import GREY, KINDS, PURPOSES, Figure, better, colour, dash, finite, is_number
from thinwire.records import write_text
from thinwire.results import Entry, Record, Results, Spread, spread
from thinwire.tables import clock, show, size

LIGHT = {"page": "#ffffff", "text": "#1d2126", "muted": "#59626d", "line": "#dde1e6", "panel": "#f5f6f8",
         "note": "#fff6e3", "edge": "#c98a0a"}  # fmt: skip
DARK = {"page": "#14171b", "text": "#e4e8ec", "muted": "#9da7b3", "line": "#30363e", "panel": "#1c2026",
        "note": "#2a2416", "edge": "#b98612"}  # fmt: skip
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath "
    "d='M1 11h4l2-7 3 9 2-5h3' fill='none' stroke='%232f78c4' stroke-width='1.8'/%3E%3C/svg%3E"
)
DEFINITIONS = {
    "Bytes sent (wire bytes)": "What a rank handed to the network to send, as thinwire's ledger counts it: the data of "
    "each operation in the pattern it travels in, without the headers of lower layers.",
    "Kernel bytes": "What the operating system's network interfaces counted on the same link, with headers and "
    "repeated packets. A few per cent above the ledger is normal.",
    "Waiting": "The share of training time in which computing stood still for the network.",
    "Training time": "Time in training steps, without evaluation, checkpoints and starting up.",
    "Time to target": "Training time until an evaluation was first as good as the target; mean over the seeds that "
    "reached it.",
    "± deviation": "The sample standard deviation over seeds. With one seed there is none.",
    "Peak memory": "The most that any one rank held.",
}


class Column(NamedTuple):
    """A column of the results: what a cell says, the value behind it, and which way is better (0: neither)."""

    heading: str
    cell: Callable[[Entry], str | None]
    value: Callable[[Entry], float | None]
    better: int


def write_report(results: Results, path: Path | None = None) -> Path:
    """Write the page, by default as report.html in the results' folder, and say where it is."""
    path = path or results.folder / "report.html"
    write_text(path, page(results))
    return path


def page(results: Results) -> str:
    """The whole page as HTML."""
    from plotly.offline import get_plotlyjs

    drawn: list[Figure] = []
    body = [_intro(results), _notes(results)]
    if results.example:
        body += [_table(results), _figures(results, drawn), _timelines(results, drawn)]
    body += [_repeat(results), _definitions()]
    scripts = [_script(get_plotlyjs()), _data(drawn), _script(SCRIPT)] if drawn else []
    return "\n".join([_head(_title(results)), *body, "</main>", *scripts, "</body></html>", ""])


def _head(title: str) -> str:
    light, dark = ("".join(f"--{name}:{value};" for name, value in look.items()) for look in (LIGHT, DARK))
    looks = f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · thinwire</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="{ICON}">
<style>{looks}{STYLE}</style></head><body><main>"""


def _title(results: Results) -> str:
    what = results.entries[0].spec if len(results.entries) == 1 else f"{len(results.entries)} strategies"
    return f"{what} on {results.example['task']}" if results.example else what


def _intro(results: Results) -> str:
    about = results.example
    heading = f"<h1>{_breakable(_title(results))}</h1>"
    if about is None:
        return f"{heading}<p>No run has finished, so there is nothing to compare yet.</p>"
    seeds = sorted({record.seed for entry in results.entries for record in entry.records})
    model = f" with model {_code(about['model'])}" if about.get("model") not in (None, about["task"]) else ""
    ranks = _count(about["ranks"], "rank")
    nodes = f" on {_count(about['nodes'], 'node')}" if about["ranks"] > 1 else ""
    link = f"link {_code(about['link'])}" if about["link"] else "no link shaped between them"
    settings = [f"{ranks}{nodes}", *([link] if about["ranks"] > 1 or about["link"] else [])]
    settings += [f"seed{'s' * (len(seeds) > 1)} {_listed(seeds)}", f"{_count(about['epochs'], 'epoch')} each"]
    what = "Strategies compared" if len(results.entries) > 1 else "One strategy"
    return f'{heading}<p class="lead">{what} on task {_code(about["task"])}{model}: {", ".join(settings)}.</p>'


def _notes(results: Results) -> str:
    notes = [*_link_notes(_summaries(results)), *_diverged_notes(results)]
    for heading, lines in (("Runs that failed", _failed(results)), ("Runs not finished", _unfinished(results))):
        if lines:
            notes.append(f"<strong>{heading}</strong><ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>")
    return "".join(f'<div class="note" role="note">{note}</div>' for note in notes)


def _link_notes(summaries: list[dict[str, Any]]) -> list[str]:
    notes = []
    for state, what, so in (
        ("not shaped", "The link was not shaped", "This machine does not permit network namespaces, so the times are "
         "those of the bare machine, not of {}. Bytes and metrics do not depend on it."),
        ("off", "The link was more than 10 % off", "Asked for: {}. Mind that when comparing times."),
    ):  # fmt: skip
        runs = [summary for summary in summaries if summary["link_state"] == state]
        some = f" in {len(runs)} of {len(summaries)} runs" if len(runs) < len(summaries) else ""
        measured = f" Measured: {text}." if (text := _measured(runs)) else ""
        if runs:
            notes.append(f"<strong>{what}{some}.</strong> {so.format(_code(runs[0]['link']))}{measured}")
    return notes


def _measured(summaries: list[dict[str, Any]]) -> str:
    """The measured link of some runs, from the lowest to the highest figure."""
    measured = [summary["link_measured"] for summary in summaries if summary.get("link_measured")]
    words = []
    for key, form, unit in (("rate_mbit", "{:.1f}", "Mbit/s"), ("latency_ms", "{:.2f}", "ms")):
        values = [form.format(v) for v in sorted(m[key] for m in measured if m.get(key) is not None)]
        words += [f"{'–'.join(dict.fromkeys((values[0], values[-1])))} {unit}"] if values else []
    return " and ".join(words)


def _diverged_notes(results: Results) -> list[str]:
    lost = [
        f"{_spec(i, entry)}, seed {record.seed}"
        for i, entry, record in _records(results)
        if record.summary and not is_number(record.summary["value"])
    ]
    what = "Runs that ended with a metric that is not a number"
    return [f"<strong>{what}</strong>, left out of the means: {'; '.join(lost)}."] if lost else []


def _failed(results: Results) -> list[str]:
    failed = [(i, entry, record) for i, entry, record in _records(results) if record.error]
    return [f"{_spec(i, e)}, seed {r.seed}: <span class=error>{escape(r.error or '')}</span>" for i, e, r in failed]


def _unfinished(results: Results) -> list[str]:
    left = [(i, e, r) for i, e, r in _records(results) if r.summary is None and not r.error]
    return [f"{_spec(i, entry)}, seed {record.seed}" for i, entry, record in left]


def _table(results: Results) -> str:
    columns = [c for c in _columns(results) if any(c.cell(entry) for entry in results.entries)]
    heads = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    best = [_best(column, results.entries) for column in columns]
    rows = "".join(_row(i, e, columns, [i in b for b in best]) for i, e in enumerate(results.entries))
    seeds = max(len(entry.records) for entry in results.entries)
    words = f"Means over seeds, ± deviation over {seeds} seeds." if seeds > 1 else "One seed, so no deviation is known."
    words += " The best of each column is underlined." if any(best) else ""
    return f"""<h2 id="results">Results</h2><p>{words}</p>
<div class="wide" role="region" aria-labelledby="results" tabindex="0"><table>
<thead><tr><th scope="col">Strategy</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"""


def _columns(results: Results) -> list[Column]:
    metric = (results.example or {}).get("metric", "loss")
    unit, sign, target = (" (%)" if metric == "accuracy" else ""), better(metric), results.target

    def value(number: float) -> str:
        return show(number, metric).removesuffix(" %")

    reached = f"Time to {show(target, metric)} (s)" if target is not None else ""
    return [
        _column(f"Final {metric}{unit}", "value", value, sign, deviation=True),
        _column(f"Best {metric}{unit}", "best", value, sign, deviation=True),
        _column("Training time (s)", "train_seconds", _seconds, -1, deviation=True),
        Column(reached, lambda e: _to_target(e, target), lambda e: _all_reached(e, target), -1),
        _column("Sent per rank", "wire_bytes_per_rank", size, -1),
        _column("Sent between nodes", "wire_bytes_by_link", size, -1, part="between"),
        Column("Between nodes, by kernel", _kernel, lambda e: None, 0),
        _column("Waiting (%)", "waiting_share", lambda share: f"{100 * share:.1f}", -1),
        _column("Samples per s", "samples_per_second", lambda speed: f"{speed:,.0f}", 1),
        _column("Peak memory", "peak_memory_bytes", size, -1),
    ]


def _column(
    heading: str, key: str, form: Callable[[float], str], better: int, *, deviation: bool = False, part: str = ""
) -> Column:
    def found(entry: Entry) -> Spread | None:
        return finite(entry, key, part)

    def cell(entry: Entry) -> str | None:
        values = found(entry)
        return _cell(values, form, len(entry.finished), deviation) if values else None

    return Column(heading, cell, lambda e: values.mean if (values := found(e)) else None, better)


def _cell(values: Spread, form: Callable[[float], str], runs: int, deviation: bool) -> str:
    known = deviation and values.deviation is not None
    around = f'<span class="sub">± {form(values.deviation or 0)}</span>' if known else ""
    some = f'<span class="sub">{len(values.values)} of {runs} seeds</span>' if len(values.values) < runs else ""
    return f'<span class="mean">{form(values.mean)}</span>{around}{some}'


def _to_target(entry: Entry, target: float | None) -> str | None:
    if target is None or not entry.finished:
        return None
    reached = entry.seconds_to(target)
    return _cell(reached, _seconds, len(entry.finished), True) if reached else '<span class="sub">not reached</span>'


def _all_reached(entry: Entry, target: float | None) -> float | None:
    """Only a strategy that got there with every seed is comparable with others."""
    reached = entry.seconds_to(target) if target is not None else None
    return reached.mean if reached and len(reached.values) == len(entry.finished) else None


def _kernel(entry: Entry) -> str | None:
    """Bytes between nodes as the kernel counted them, and by how much that differs from the ledger."""
    runs = [summary for record in entry.finished if (summary := record.summary) and summary["kernel_bytes_by_link"]]
    kernel = spread([float(run["kernel_bytes_by_link"].get("between", 0)) for run in runs])
    ledger = spread([float((run["wire_bytes_by_link"] or {}).get("between", 0)) for run in runs])
    if kernel is None or ledger is None:
        return None
    apart = f'<span class="sub">{100 * (kernel.mean / ledger.mean - 1):+.1f} %</span>' if ledger.mean else ""
    return f"{size(kernel.mean)}{apart.replace('-', '−')}"


def _best(column: Column, entries: list[Entry]) -> set[int]:
    """Which entries have the best value of a column; none where there is nothing to choose between."""
    values = {i: value for i, entry in enumerate(entries) if (value := column.value(entry)) is not None}
    if column.better == 0 or len(set(values.values())) < 2:
        return set()
    best = max(column.better * value for value in values.values())
    return {i for i, value in values.items() if column.better * value == best}


def _row(i: int, entry: Entry, columns: list[Column], best: list[bool]) -> str:
    done, asked = len(entry.finished), len(entry.records)
    some = f'<span class="sub">{done} of {asked} runs finished</span>' if done < asked else ""
    cells = [(column.cell(entry) or "–", mark) for column, mark in zip(columns, best, strict=True)]
    row = "".join(f'<td class="best">{cell}</td>' if mark else f"<td>{cell}</td>" for cell, mark in cells)
    return f'<tr><th scope="row"><div class="name">{_spec(i, entry)}{some}</div></th>{row}</tr>\n'


def _figures(results: Results, drawn: list[Figure]) -> str:
    metric = escape(results.example["metric"]) if results.example else ""
    time, sent = figures.curves(results, "train_seconds"), figures.curves(results, "wire_bytes")
    least = [figures.front(results, "wire_bytes_per_rank"), figures.front(results, "train_seconds")]
    purposes = figures.purposes(results)
    parts = {part for entry in results.entries for part in figures.purpose_bytes(entry)}
    shades = [(f"{purpose}, {where} nodes", PURPOSES.get(purpose, GREY), where == "inside")
              for purpose, where in sorted(parts, key=figures.purpose_order)]  # fmt: skip
    return "\n".join(
        [
            f'<section><h2>{metric.capitalize()} during training</h2>{_key(results)}<div class="pair">',
            _figure(time, drawn, "No evaluation was recorded, so there is nothing to draw over time."),
            _figure(sent, drawn, "Nothing was sent, so there is nothing to draw over bytes."),
            f'</div></section><section><h2>Final {metric} and its cost</h2>{_key(results)}<div class="pair">',
            _figure(least[0], drawn, "Nothing was sent, so there are no bytes to compare."),
            _figure(least[1], drawn, "No training time was recorded."),
            "</div></section><section><h2>What the bytes were for</h2>",
            _plot(purposes, drawn, _shades(shades)) if purposes else '<p class="none">Nothing was sent.</p>',
            "</section>",
        ]
    )


def _timelines(results: Results, drawn: list[Figure]) -> str:
    found = [(i, e, f) for i, e in enumerate(results.entries) if (f := figures.timeline(i, e))]
    if not found:
        return "<h2>Timeline</h2><p>No timeline was recorded.</p>"
    shades = [("computing", KINDS["computing"], False), ("waiting for the network", KINDS["waiting"], False),
              ("on the wire", KINDS["communication"], False)]  # fmt: skip
    words = (
        "A few steps of each rank. The upper bar is the computing thread, the lower one what was on the wire "
        "meanwhile: blue below grey is communication hidden behind computing. Each strategy has its own time scale."
    )
    parts: list[str] = []
    for i, entry, figure in found:
        waiting = finite(entry, "waiting_share")
        share = f' <span class="sub">waiting {100 * waiting.mean:.1f} %</span>' if waiting else ""
        opened = " open" if not parts else ""
        parts.append(f"<details{opened}><summary>{_spec(i, entry)}{share}</summary>{_plot(figure, drawn)}</details>")
    first, rest = parts[0], "".join(parts[1:])
    return f"<section><h2>Timeline</h2><p>{words}</p>{_shades(shades)}{first}</section>{rest}"


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
        f'<button type="button" aria-pressed="true" data-strategy="{i}">{_spec(i, entry)}</button>'
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
    asked = f"{_code(about['link'])} asked for" if about.get("link") else "none asked for"
    measured = _measured(_summaries(results))
    facts = {"Versions": versions or "not known", "Link": asked + (f"; measured {measured}" if measured else "")}
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    runs = "".join(f"<li>{_code(_place(results, r))} <span>{_outcome(r)}</span></li>" for _, _, r in _records(results))
    return f"""<h2>Repeat it</h2><pre><code>{escape(results.command)}</code></pre><dl class="facts">{listed}</dl>
<h3>Runs, in the folder of this page</h3><ul class="runs">{runs}</ul>"""


def _place(results: Results, record: Record) -> str:
    if record.folder == results.folder or not record.folder.is_relative_to(results.folder):
        return record.folder.name
    return str(record.folder.relative_to(results.folder))


def _outcome(record: Record) -> str:
    if record.summary is None:
        return "failed" if record.error else "not finished"
    return f"{show(record.summary['value'], record.summary['metric'])}, {clock(record.summary['train_seconds'])}"


def _definitions() -> str:
    items = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in DEFINITIONS.items())
    return f"<h2>How to read these figures</h2><dl>{items}</dl>"


def _data(drawn: list[Figure]) -> str:
    """Everything to draw, as JSON that cannot end its script early."""
    look = {"light": LIGHT, "dark": DARK}
    named = {figure.name: {"data": figure.data, "layout": figure.layout} for figure in drawn}
    text = json.dumps({"look": look, "figures": named}, separators=(",", ":"), allow_nan=False)
    return f'<script type="application/json" id="drawn">{text.replace("<", chr(92) + "u003c")}</script>'


def _script(code: str) -> str:
    return f"<script>{code}</script>"


def _records(results: Results) -> list[tuple[int, Entry, Record]]:
    return [(i, entry, record) for i, entry in enumerate(results.entries) for record in entry.records]


def _summaries(results: Results) -> list[dict[str, Any]]:
    return [record.summary for _, _, record in _records(results) if record.summary]


def _spec(i: int, entry: Entry) -> str:
    ring = {"solid": "solid", "dot": "dotted"}.get(dash(i), "dashed")
    badge = f'<b class="badge" style="border:2px {ring} {colour(i)}">{i + 1}</b>'
    return f'{badge}<span class="spec">{_breakable(entry.spec)}</span>'


def _breakable(text: str) -> str:
    """Text that may wrap after brackets, commas and the equals signs before words."""
    return re.sub(r"([(,]|=(?=[a-z]))(?=\S)", r"\1<wbr>", escape(text))


def _code(text: Any) -> str:
    return f"<code>{escape(str(text))}</code>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(values: list[int]) -> str:
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


STYLE = """
:root{color-scheme:light dark;--font:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.55 var(--font);-webkit-text-size-adjust:100%}
main{max-width:1100px;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1{font-size:1.75rem;line-height:1.25;font-weight:650;margin:0 0 .5rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.25rem;font-weight:650;margin:3rem 0 .5rem;padding-top:1rem;border-top:1px solid var(--line)}
h3{font-size:1rem;font-weight:650;margin:0}
p{margin:.25rem 0 .75rem;max-width:72ch;text-wrap:pretty}
code,pre{font-family:var(--mono);font-size:.9em;overflow-wrap:anywhere}
pre{background:var(--panel);padding:.9rem 1rem;border-radius:6px;white-space:pre-wrap;margin:.75rem 0}
.sub,.reading,.none,dd,.runs span{color:var(--muted)}
.lead{font-size:1.05rem}
.note{background:var(--note);border-left:4px solid var(--edge);border-radius:4px;padding:.7rem 1rem;margin:1rem 0}
.note ul{margin:.3rem 0 0;padding-left:1.2rem}
.error{white-space:pre-wrap;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:0 -1.25rem;padding:0 1.25rem}
table{border-collapse:collapse;font-size:.875rem;line-height:1.4;min-width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.55rem .45rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line)}
thead th{vertical-align:bottom;font-weight:600;color:var(--muted);font-size:.8125rem}
td{white-space:nowrap}
tr>:first-child{text-align:left;padding-left:0;position:sticky;left:-1.25rem;background:var(--page)}
tbody th{font-weight:400}
td .sub,th .sub{font-size:.9em;display:block}
summary .sub{white-space:nowrap}
.name{position:relative;padding-left:2rem;min-width:14rem;max-width:20rem}
.name .badge{position:absolute;left:0;top:-.05rem}
.best .mean{text-decoration:underline;text-decoration-thickness:2px;text-underline-offset:.25em;font-weight:600}
.badge{display:inline-grid;place-items:center;min-width:1.5rem;height:1.5rem;border-radius:1rem;font-size:.75rem;
font-weight:600;line-height:1;margin-right:.45rem;flex:none}
.spec{overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 2rem;margin-top:1rem}
.pair figure{display:grid;grid-template-rows:subgrid;grid-row:span 3}
.pair .none{grid-row:span 3}
figure{margin:0}
.reading{font-size:.9rem;margin:.15rem 0 .5rem}
.plot{width:100%;min-width:0;overflow:hidden}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;margin:.5rem 0;font-size:.875rem;line-height:1.35}
.key button{display:flex;align-items:center;text-align:left;font:inherit;color:inherit;background:none;border:0;
padding:.1rem 0;cursor:pointer;max-width:100%}
.key button[aria-pressed=false]{opacity:.4;text-decoration:line-through}
.shades span{display:flex;align-items:center}
.shades i{width:1.1rem;height:.75rem;margin-right:.4rem;background:var(--shade);border-radius:2px}
.shades i.hatched{background:repeating-linear-gradient(-45deg,var(--shade) 0 1.5px,transparent 1.5px 5px);
outline:1px solid var(--shade);outline-offset:-1px}
details{border-bottom:1px solid var(--line);padding:.35rem 0}
summary{cursor:pointer;padding:.35rem 0;font-size:.9rem}
dl{margin:.5rem 0;max-width:80ch}dt{font-weight:600;margin-top:.7rem}dd{margin:0}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem}.facts dt{margin:0}
.runs{list-style:none;margin:.5rem 0;padding:0;columns:2 19rem;column-gap:2rem;font-size:.875rem;line-height:1.7}
.runs li{break-inside:avoid}
:focus-visible{outline:2px solid #2f78c4;outline-offset:2px}
@media (max-width:760px){
main{padding-top:1.5rem}h1{font-size:1.4rem}.pair{grid-template-columns:minmax(0,1fr);gap:1.75rem}
.pair figure{display:block}.name{min-width:10rem;max-width:11rem}}
@page{margin:15mm}
@media print{
:root{color-scheme:light}body{font-size:10pt}main{max-width:none;padding:0}
.pair{grid-template-columns:1fr 1fr;gap:0 1.5rem}.pair figure{display:grid}
h2{margin-top:1.5rem}.key,.reading{font-size:8.5pt}
section,figure,details,tr,.note,pre,dt,.runs{break-inside:avoid}h1,h2,h3,.key,dt{break-after:avoid}
.wide{overflow:visible;margin:0;padding:0}table{font-size:7pt}thead th{font-size:7pt;min-width:0}
th,td{padding:.3rem .25rem}.name{max-width:9rem;min-width:7rem;padding-left:1.9rem}tr>:first-child{position:static}}
"""

SCRIPT = """
(() => {
  const {look, figures} = JSON.parse(document.getElementById("drawn").textContent);
  const dark = matchMedia("screen and (prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")], folds = [...document.querySelectorAll("details")];
  const font = getComputedStyle(document.body).fontFamily, clear = "rgba(0,0,0,0)", hidden = new Set();
  const config = {responsive: true, displaylogo: false, displayModeBar: "hover",
                  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]};
  let printing = false, closed = [];

  const dress = ({data, layout}, colours, width, height) => {
    Object.assign(layout, {width, height, paper_bgcolor: clear, plot_bgcolor: clear,
      font: {family: font, size: 12, color: colours.text},
      hoverlabel: {bgcolor: colours.panel, bordercolor: colours.muted, align: "left", font: {color: colours.text}},
      modebar: {bgcolor: clear, color: colours.muted, activecolor: colours.text}});
    for (const name of Object.keys(layout).filter(key => /^[xy]axis/.test(key)))
      Object.assign(layout[name], {gridcolor: colours.line, linecolor: colours.line, tickcolor: colours.line});
    for (const trace of data) {
      if (trace.marker?.symbol === "circle") trace.marker.color = colours.page;
      if ("meta" in trace) trace.visible = !hidden.has(trace.meta);
    }
  };
  const draw = plot => {
    if (plot.closest("details:not([open])")) return;
    const figure = figures[plot.id], half = plot.closest(".pair");
    figure.height ??= figure.layout.height;
    const colours = dark.matches && !printing ? look.dark : look.light;
    const size = printing ? [half ? 320 : 670, half ? 230 : figure.height] : [undefined, figure.height];
    dress(figure, colours, ...size);
    plot.style.height = `${size[1]}px`;
    Plotly.react(plot, figure.data, figure.layout, config);
  };
  const drawAll = () => plots.forEach(draw);

  drawAll();
  dark.addEventListener("change", drawAll);
  folds.forEach(fold => fold.addEventListener("toggle", () => fold.querySelectorAll(".plot").forEach(draw)));
  addEventListener("beforeprint", () => {
    printing = true;
    closed = folds.filter(fold => !fold.open);
    closed.forEach(fold => fold.open = true);
    drawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    drawAll();
    closed.forEach(fold => fold.open = false);
  });
  addEventListener("click", event => {
    const button = event.target.closest("button[data-strategy]");
    if (!button) return;
    const strategy = Number(button.dataset.strategy), shown = hidden.delete(strategy);
    if (!shown) hidden.add(strategy);
    for (const same of document.querySelectorAll(`button[data-strategy="${strategy}"]`))
      same.setAttribute("aria-pressed", shown);
    drawAll();
  });
})();
"""
