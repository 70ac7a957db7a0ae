"""The figure of what the bytes were sent for: a bar for each strategy."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

from thinwire.common.formats import format_bytes
from thinwire.compare.report.axes import linear_bytes
from thinwire.compare.report.style import GREY, Figure, Trace, hover_text, layout_of, short
from thinwire.compare.results import Entry, Results

PURPOSES = {"train": "#2f78c4", "sync": "#12a07a", "eval": "#c98a0a", "checkpoint": "#c7619f", "start": "#858d97"}

Part = tuple[str, str]  # a purpose, and "inside" or "between" nodes


def purpose_figure(results: Results) -> Figure | None:
    """The bytes of all ranks by purpose, and by whether they left their node; None if nothing was sent."""
    sent = {i: totals for i, entry in enumerate(results.entries) if (totals := purpose_bytes(entry))}
    if not sent:
        return None
    rows = {i: row for row, i in enumerate(sent)}
    data = [_bars(part, sent, rows) for part in purpose_parts(results)]
    labels = [label for i in sent for label in _bar_labels(i, results.entries[i].name, sent[i], rows[i])]
    longest = max(totals.total() for totals in sent.values())
    xaxis = linear_bytes(longest, "bytes sent by all ranks").layout | {"range": [0, longest * 1.2]}
    yaxis = {"visible": False, "range": [len(sent) - 0.5, -0.75], "fixedrange": True}
    layout = layout_of(70 + 54 * len(sent), xaxis=xaxis, yaxis=yaxis, barmode="stack", annotations=labels)
    layout["margin"] |= {"l": 16}
    reading = (
        "Solid: bytes that left their node. Hatched: bytes that stayed inside it. Mean over seeds, all ranks together."
    )
    return Figure("purposes", "What the bytes were for", reading, data, layout)


def purpose_bytes(entry: Entry) -> Counter[Part]:
    """The bytes of all ranks in a whole run, by purpose and by "inside" or "between" nodes: mean over seeds."""
    total: Counter[Part] = Counter()
    summaries = [record.summary for record in entry.finished if record.summary]
    for summary in summaries:
        for purpose, links in summary["wire_bytes_by_purpose"].items():
            total.update({(purpose, link): count for link, count in links.items()})
    return Counter({part: round(count / len(summaries)) for part, count in total.items() if count})


def purpose_parts(results: Results) -> list[Part]:
    """All parts of the bars, in their order."""
    names = list(PURPOSES)

    def order(part: Part) -> tuple[int, str, str]:
        return (names.index(part[0]) if part[0] in names else len(names), *part)

    return sorted({part for entry in results.entries for part in purpose_bytes(entry)}, key=order)


def purpose_colour(purpose: str) -> str:
    """The colour of a purpose in the bars and in their key."""
    return PURPOSES.get(purpose, GREY)


def _bars(part: Part, sent: dict[int, Counter[Part]], rows: dict[int, int]) -> Trace:
    """One part of every strategy's bar."""
    purpose, where = part
    colour = purpose_colour(purpose)
    pattern = {"shape": "/", "fgcolor": colour, "bgcolor": f"{colour}30", "size": 6, "solidity": 0.35}
    marker = {"color": colour, "line": {"width": 0}} | ({"pattern": pattern} if where == "inside" else {})
    x = [totals[part] for totals in sent.values()]
    texts = [f"{escape(purpose)}, {where} nodes: {format_bytes(value)}" for value in x]
    bars = {"type": "bar", "orientation": "h", "x": x, "y": list(rows.values()), "width": 0.4}
    return {**bars, "marker": marker, **hover_text(texts)}


def _bar_labels(i: int, spec: str, totals: Counter[Part], row: int) -> list[dict[str, Any]]:
    """The name of the strategy above its bar, and the total at the end."""
    name = f"<b>{i + 1}</b>  {escape(short(spec), quote=False)}"
    left = {"showarrow": False, "xanchor": "left", "align": "left"}
    above = {"x": 0, "y": row, "xref": "paper", "yshift": 20, "text": name, "font": {"size": 12}}
    after = {"x": totals.total(), "y": row, "xshift": 4, "text": format_bytes(totals.total()), "font": {"size": 12}}
    return [left | above, left | after]
