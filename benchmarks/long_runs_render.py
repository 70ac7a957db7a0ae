"""The results of benchmarks/long_runs.py: growth per 1,000 steps, a verdict, and the table of a page."""

from __future__ import annotations

import json
from pathlib import Path

from conditions import Found, where
from floor_render import markdown, with_section

WARM_UP = 2000  # steps in which a run fills what it fills once
LAST = 3000  # steps by which it is judged
SECTION = "long-runs"
COUNTS = {"threads": 0.0, "descriptors": 0.0, "groups": 0.0, "tensors": 0.0, "objects": 5.0, "ledger_totals": 0.0,
          "timeline_spans": 0.0, "temporary_files": 0.0}  # fmt: skip
RSS_BYTES = 128 * 1024
FLAT = {**COUNTS, "rss_bytes": RSS_BYTES}  # growth per 1,000 steps up to which something is flat
FILES = ("metrics_bytes", "ledger_bytes", "timeline_bytes")


def growth(row: Found, name: str, begin: int = WARM_UP) -> float:
    """Per 1,000 steps from a step on (of a short run, in its second half), of the rank where it is largest."""
    found = []
    for every in row["samples"]:
        after = [one for one in every if one["step"] >= begin]
        samples = after if len(after) > 2 else every[len(every) // 2 :]
        first, last = samples[0], samples[-1]
        steps = max(1, last["step"] - first["step"])
        found.append(1000 * (last.get(name, 0) - first.get(name, 0)) / steps)
    return max(found)


def highest(row: Found, name: str) -> int:
    """The last value, of the rank where it is highest."""
    return max(samples[-1].get(name, 0) for samples in row["samples"])


def growing(row: Found) -> list[str]:
    """What grows in the last steps. Before, strategies may begin new phases, which hold more.

    Counts go up and down: of a group that is new, not all connections are there. So the most of the last two samples is
    compared with the most of those before.
    """
    begin = row["samples"][0][-1]["step"] - LAST
    found = ["rss_bytes"] if growth(row, "rss_bytes", begin) > RSS_BYTES else []
    for samples in row["samples"]:
        last = [one for one in samples if one["step"] >= begin]
        for name, most in COUNTS.items():
            before, now = (max(one.get(name, 0) for one in part) for part in (last[:-2] or samples[:1], last[-2:]))
            if now - before > 2 * most and name not in found:
                found.append(name)
    return found


def verdict(row: Found) -> str:
    """flat, or what grows."""
    found = growing(row)
    return f"grows: {', '.join(found)}" if found else "flat"


def row_summary(row: Found) -> str:
    """A row in a line of progress."""
    if "failed" in row:
        return f"{row['name']} failed: {row['failed']}"
    return f"{row['name']}: {verdict(row)}; {growth(row, 'rss_bytes') / 1024:+.0f} KiB, {row['seconds']:.0f} s"


def table(results: Found) -> tuple[list[str], list[list[str]]]:
    """What is held at the end, and its growth per 1,000 steps in brackets."""
    heads = ["run", "memory, MiB", "in the last 3,000", "threads", "descriptors", "groups", "tensors", "objects"]
    heads += ["ledger, rows", "written, kB", "verdict"]
    rows = []
    for row in (one for one in results["rows"] if "failed" not in one):
        memory = f"{highest(row, 'rss_bytes') / 2**20:.0f} ({growth(row, 'rss_bytes') / 2**20:+.2f})"
        names = ("threads", "descriptors", "groups", "tensors", "objects", "ledger_totals")
        cells = [f"{growth(row, 'rss_bytes', row['samples'][0][-1]['step'] - LAST) / 2**20:+.2f}"]
        cells += [f"{highest(row, name)} ({growth(row, name):+.4g})" for name in names]
        written = sum(highest(row, name) for name in FILES) / 1000, sum(growth(row, name) for name in FILES) / 1000
        files = f"{written[0]:.0f} ({written[1]:+.1f})" if written[0] else "–"
        rows.append([f"`{row['spec'] or row['name']}`", memory, *cells, files, verdict(row)])
    return heads, rows


def about(results: Found) -> str:
    """What was measured, where, and when with which revision."""
    rows = results["rows"]
    versions, steps = results["versions"], sorted({f"{row['steps']:,}" for row in rows})
    return (
        f"{len(rows)} runs of {' or '.join(steps)} steps on {where(results['hardware'])}; torch {versions['torch']}, "
        f"Python {versions['python']}, thinwire {versions['thinwire']}; measured at {results['revision']} "
        f"({results['date']})"
    )


def failures(results: Found) -> list[str]:
    """Runs that failed, with the reason."""
    return [f"{row['name']}: {row['failed']}" for row in results["rows"] if "failed" in row]


def show(results: Found) -> None:
    """Print the table."""
    print(markdown(table(results)))
    for text in failures(results):
        print(f"failed: {text}")
    print(about(results))


def section(results: Found) -> str:
    """The generated part of the page."""
    failed = "\n".join(f"- failed: {text}" for text in failures(results))
    parts = [f"{about(results)}.", markdown(table(results)), failed, f"```text\n{results['command']}\n```"]
    return "\n\n".join(part for part in parts if part)


def render(folder: Path) -> None:
    """Write the section of speed.md from the results in the same folder."""
    page = folder / "speed.md"
    results = json.loads((folder / "long-runs.json").read_text())
    page.write_text(with_section(page.read_text(), SECTION, section(results)))
