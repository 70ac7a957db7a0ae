"""The results of benchmarks/floor.py as tables in a terminal, as Markdown and as a picture."""

from __future__ import annotations

import json
import re
import statistics
from html import escape
from pathlib import Path

from conditions import Found, where
from floor_results import BY_HAND, LINKS, Line, line
from floor_rows import BY_NAME, DDP

SECTIONS = {"gpu": "speed-gpu", "cpu": "speed-cpu"}
STYLE = """text { font: 13px sans-serif; fill: #333 } .title { font-weight: bold } .bar { fill: #6ea3dd }
.mark { fill: #b3261e } @media (prefers-color-scheme: dark) { text { fill: #ddd } .bar { fill: #3a6ea5 }
.mark { fill: #ffb74d } }"""
LEFT, WIDTH, ROW = 430, 980, 22
MOST_LETTERS = 54  # of a name in the picture: as many fit, also in a wide font
LINK_NAMES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "none": "loopback"}
Table = tuple[list[str], list[list[str]]]  # heads, rows


def lines(results: Found, link: str) -> list[Line]:
    """The rows that were measured on a link, in the order of the table of rows."""
    order = list(BY_NAME)
    found = [row for row in results["rows"] if row["link"] == link and "failed" not in row]
    return [line(row) for row in sorted(found, key=lambda row: order.index(row["row"]))]


def measured_links(results: Found) -> list[str]:
    """The links with rows, the slowest first."""
    return [link for link in LINKS if any(row["link"] == link for row in results["rows"])]


def link_table(results: Found, link: str) -> Table:
    """What was found on one link."""
    found = lines(results, link)
    base = next((one for one in found if one.name == DDP), None)
    has_memory = any(one.gigabytes is not None for one in found)
    heads = ["method", "sent, MB", "floor, ms", "compute, ms", "bound, ms", "measured, ms", "÷ bound", "× DDP"]
    heads += ["memory (× DDP's)"] if has_memory else ["cores busy, ms"]
    rows = []
    for one in found:
        bound = f"{one.bound:.1f}{' (sum)' if one.blocks else ''}"
        cells = [f"`{one.name}`", f"{one.megabytes:.2f}", f"{one.floor:.1f}" if one.floor else "–"]
        cells += [
            f"{one.compute:.1f}",
            bound,
            f"{one.ms:.1f}",
            f"{one.ratio:.2f}",
            f"{one.ms / base.ms:.2f}" if base else "–",
        ]
        if has_memory:
            memory = one.gigabytes or 0.0
            over = f" (× {memory / base.gigabytes:.2f})" if base and base.gigabytes else ""
            cells.append(f"{memory:.2f} GB{over}")
        else:
            cells.append(f"{one.cpu:.1f}")
        rows.append(cells)
    return heads, rows


def pays_table(results: Found) -> Table:
    """The time of a step ÷ that of plain DDP, by link."""
    links = [link for link in measured_links(results) if any(one.name == DDP for one in lines(results, link))]
    by_link = {link: {one.name: one.ms for one in lines(results, link)} for link in links}
    rows = []
    for name in BY_NAME:
        cells = [f"{own[name] / own[DDP]:.2f}" if name in own else "–" for own in by_link.values()]
        if any(cell != "–" for cell in cells):
            rows.append([f"`{name}`", *cells])
    return ["method", *(LINK_NAMES[link] for link in links)], rows


def trainer_table(results: Found) -> Table:
    """The trainer alone against a loop written by hand; ratios are those of each round, and then the median."""
    rows = []
    for found in (one for one in results["trainer"] if "failed" not in one):
        by_hand = found["ms"][BY_HAND]
        for name, times in found["ms"].items():
            ratio = statistics.median(ms / base for ms, base in zip(times, by_hand, strict=True))
            rows.append([found["name"], name, f"{statistics.median(times):.2f}", f"{ratio:.3f}"])
    return ["model", "loop", "ms a step", "× written by hand"], rows


def row_summary(found: Found) -> str:
    """A row in a line of progress."""
    own = line(found)
    kind = "compute + floor" if own.blocks else "max(compute, floor)"
    text = f"{own.ms:.1f} ms a step, {own.ratio:.2f} × {kind}"
    return f"{text} (compute {own.compute:.1f}, floor {own.floor:.1f}, {own.megabytes:.2f} MB)"


def trainer_summary(found: Found) -> str:
    """The trainer alone with one model, in a line of progress."""
    return ", ".join(f"{name} {statistics.median(times):.2f} ms" for name, times in found["ms"].items())


def failures(results: Found) -> list[str]:
    """Rows that failed, with the reason."""
    rows = [(f"{row['row']}, {LINK_NAMES[row['link']]}", row) for row in results["rows"] if "failed" in row]
    rows += [(one["name"], one) for one in results["trainer"] if "failed" in one]
    return [f"{name}: {row['failed']}" for name, row in rows]


def about(results: Found) -> str:
    """What was measured, where, and when with which revision."""
    versions = results["versions"]
    precision = ", bfloat16" if results["device"] == "cuda" else ""
    return (
        f"{results['model']}, {results['parameters'] / 1e6:.2f} M parameters, batch {results['batch_size']} a rank"
        f"{precision}, {results['ranks']} ranks on {where(results['hardware'])}; torch {versions['torch']}, "
        f"Python {versions['python']}, thinwire {versions['thinwire']}; {measured_at(results)}"
    )


def measured_at(results: Found) -> str:
    """The revisions and dates of all rows, the oldest first."""
    dates: dict[str, list[str]] = {}
    for found in sorted(results["rows"] + results["trainer"], key=lambda one: one["date"]):
        kernels = f" with {found['kernels']} kernels" if "kernels" in found else ""
        dates.setdefault(found["revision"] + kernels, []).append(found["date"])
    texts = [f"{name} ({' to '.join(dict.fromkeys([own[0], own[-1]]))})" for name, own in dates.items()]
    return "measured at " + " and ".join(texts) if texts else "nothing is measured yet"


def compute_text(results: Found, link: str) -> str:
    """The compute times next to all rows of a link: their median and their range show the drift of the machine."""
    times = [ms for row in results["rows"] if row["link"] == link for ms in row.get("compute_ms", [])]
    rates = [f"{rate:.0f} Mbit/s ({hosts} hosts)" for hosts, rate in results["links"].get(link, {}).items()]
    measured = f"link measured at {' and '.join(rates)}; " if rates else ""
    if not times:
        return measured.rstrip("; ")
    return f"{measured}compute {statistics.median(times):.1f} ms ({min(times):.1f} – {max(times):.1f})"


# ---- terminal


def show(results: Found) -> None:
    """Print all tables."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    tables = [(f"{LINK_NAMES[k]}: {compute_text(results, k)}", link_table(results, k)) for k in measured_links(results)]
    tables += [("time of a step ÷ that of plain DDP", pays_table(results)), ("trainer alone", trainer_table(results))]
    for title, (heads, rows) in tables:
        if rows:
            shown = RichTable(title=title, title_justify="left", title_style="bold")
            for i, head in enumerate(heads):
                shown.add_column(head, justify="left" if not i else "right")
            for row in rows:
                shown.add_row(*(cell.replace("`", "") for cell in row))
            console.print(shown)
    for text in failures(results):
        console.print(f"failed: {text}", markup=False)
    console.print(about(results), markup=False)


# ---- page


def render(folder: Path) -> None:
    """Write the sections of speed.md, and the pictures, from the results in the same folder."""
    page = folder / "speed.md"
    text = page.read_text()
    for name in SECTIONS.values():
        file = folder / f"{name}.json"
        if file.exists():
            results = json.loads(file.read_text())
            text = with_section(text, name, section(results, name))
            (folder / f"{name}.svg").write_text(picture(results))
    page.write_text(text)


def with_section(page: str, name: str, content: str) -> str:
    """The page with new content between the marks of a section."""
    return re.sub(
        rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{content}\n\n{m[2]}", page, flags=re.S
    )


def markdown(table: Table) -> str:
    """A table as Markdown; numbers are aligned to the right."""
    heads, rows = table
    texts = [["|".join(["", *(f" {cell} " for cell in row), ""])] for row in [heads, *rows]]
    return "\n".join([texts[0][0], "|---|" + "--:|" * (len(heads) - 1), *(text for (text,) in texts[1:])])


def section(results: Found, name: str) -> str:
    """The generated part of the page for one device."""
    parts = [about(results) + ".", f"![Milliseconds of a step, by link and method]({name}.svg)"]
    for title, table in (
        ("Trainer alone, one rank", trainer_table(results)),
        ("Time of a step ÷ that of plain DDP on the same link", pays_table(results)),
        *((f"{LINK_NAMES[k]}; {compute_text(results, k)}", link_table(results, k)) for k in measured_links(results)),
    ):
        if table[1]:
            parts += [f"**{title}**", markdown(table)]
    failed = failures(results)
    if failed:
        parts += ["Failed:", "\n".join(f"- {text}" for text in failed)]
    commands = "\n".join(results["commands"])
    parts += [f"```text\n{commands}\n```"]
    return "\n\n".join(parts)


def picture(results: Found) -> str:
    """Bars of the measured step for the main rows of each link, with a mark where the bound is."""
    parts, y = [], 4
    for link in measured_links(results):
        found = [one for one in lines(results, link) if BY_NAME[one.name].main]
        if not found:
            continue
        parts.append(f'<text class="title" x="0" y="{y + 13}">{LINK_NAMES[link]}: milliseconds of a step</text>')
        y += 24
        per_ms = (WIDTH - LEFT - 110) / max(max(one.ms, one.bound) for one in found)
        for one in found:
            bar, mark = one.ms * per_ms, one.bound * per_ms
            parts += [
                f'<text x="0" y="{y + 13}">{escape(shortened(one.name))}</text>',
                _rect("bar", LEFT, y, bar, 16),
                _rect("mark", LEFT + mark - 1.5, y - 2, 3, 20),
                f'<text x="{LEFT + max(bar, mark) + 8:.1f}" y="{y + 13}">{one.ms:.1f}, {one.ratio:.2f} × bound</text>',
            ]
            y += ROW
        y += 14
    parts += [
        _rect("bar", LEFT, y + 2, 24, 12),
        f'<text x="{LEFT + 32}" y="{y + 13}">measured, in ms</text>',
        _rect("mark", LEFT + 10.5, y + ROW - 2, 3, 20),
        f'<text x="{LEFT + 32}" y="{y + ROW + 13}">bound, from compute and wire floor</text>',
    ]
    height = y + 2 * ROW + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'


def shortened(name: str) -> str:
    """A name that fits on the left of the bars: without its last settings if it is long."""
    if len(name) <= MOST_LETTERS:
        return name
    kept = name[: MOST_LETTERS - 4]
    return f"{kept.rpartition(', ')[0]}, …)" if ", " in kept else f"{kept}…"
