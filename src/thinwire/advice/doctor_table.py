"""A diagnosis in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thinwire.advice.diagnosis import Diagnosis
from thinwire.advice.findings import LEVELS, Finding
from thinwire.advice.measurements import Measurements
from thinwire.common.formats import format_rate

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


def diagnosis_table(found: Diagnosis) -> Group:
    """What was examined, one line each; below a finding that is not ok, what it means and what to try."""
    ranks, nodes = len(found.facts), found.num_nodes
    title = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, launcher: {found.launcher}"
    parts: list[RenderableType] = [Text(title, style="italic"), _lines(found.findings)]
    if found.measured is not None and found.measured.ring is not None:
        parts.append(_matrix(found.measured))
    counts = [(level, sum(one.level == level for one in found.findings)) for level in reversed(LEVELS)]
    words = ", ".join(f"{count} {level}{'s' * (count > 1 and level != 'ok')}" for level, count in counts if count)
    verdict = "a run would fail here" if found.failed else "a run can start here"
    return Group(*parts, Text(f"{verdict}: {words}", style=STYLES["failure" if found.failed else "ok"]))


def _lines(findings: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        words = Text(one.value)
        if one.level != "ok":
            words.append(f"\n{one.meaning}", style="dim")
            words.append(f"\ntry: {one.advice}" if one.advice else "", style="dim")
        table.add_row(Text(one.level, style=STYLES[one.level]), one.title, words)
    return table


def _matrix(measured: Measurements) -> RenderableType:
    """Mbit/s from the rank of a row to that of a column, and the latency of the pair."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("rank", justify="right")
    for rank in measured.probed:
        table.add_column(str(rank), justify="right", no_wrap=True)
    for rank, row in zip(measured.probed, measured.links, strict=True):
        cells = [f"{format_rate(link.rate_mbit)}, {link.latency_ms:.2g}" if link else "–" for link in row]
        table.add_row(str(rank), *cells)
    return Padding(Group(Text("Mbit/s from row to column, and ms one way", style="italic"), table), (1, 0, 0, 0))
