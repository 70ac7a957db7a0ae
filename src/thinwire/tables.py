"""Results as tables for a terminal, and figures in the words that people use for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Table

from thinwire.results import Entry, Results, Spread, on_link


def result_table(summary: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    """The end of a run: what it reached, and what each purpose sent in what time."""
    value = show(summary["value"], summary["metric"])
    ranks = f"{summary['ranks']} rank{'s' * (summary['ranks'] != 1)}"
    title = f"{summary['task']} · {summary['strategy']} · {ranks} · {summary['metric']} {value}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.padding, table.collapse_padding = (0, 1), True
    table.caption = (
        f"{clock(summary['seconds'])} in all, {clock(summary['train_seconds'])} of it training, "
        f"{100 * summary['waiting_share']:.0f} % of that waiting for the network; "
        f"{summary['parameters']:,} parameters\n"
        f"a rank sent {size(summary['wire_bytes_per_rank'])} on average; the rows are rank 0's"
    )
    if summary["nodes"] > 1 or summary["link"]:
        table.caption += f"\n{network_line(summary)}"
    for heading in ("purpose", "link", "operation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "calls", "payload", "wire", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row["wire_bytes"]):
        numbers = (f"{row['calls']:,}", size(row["payload_bytes"]), size(row["wire_bytes"]), clock(row["seconds"]))
        table.add_row(row["purpose"], row["link"], row["op"], str(row["ranks"]), *numbers)
    return table


def network_line(summary: dict[str, Any]) -> str:
    """Nodes, link and what crossed it, in words."""
    words = [f"{summary['nodes']} nodes" if summary["nodes"] > 1 else "1 node"]
    if summary["link"]:
        words.append(f"link {summary['link']}, {link_words(summary)}")
    if summary["kernel_bytes_by_link"]:
        ledger, kernel = (summary[f"{who}_bytes_by_link"]["between"] for who in ("wire", "kernel"))
        words.append(f"between nodes {size(ledger)} by the ledger, {size(kernel)} by the kernel")
    return "; ".join(words)


def link_words(summary: dict[str, Any]) -> str:
    """How the link of a run turned out.

    >>> link_words({"link_state": "off", "link_measured": {"rate_mbit": 70.0, "latency_ms": 0.01}})
    'measured 70 Mbit/s, 0.01 ms: OFF by more than 10 %'
    """
    measured = summary["link_measured"]
    if measured is None:
        return "NOT SHAPED"
    words = f"measured {measured['rate_mbit']:.3g} Mbit/s, {measured['latency_ms']:.2g} ms"
    return f"{words}: OFF by more than 10 %" if summary["link_state"] == "off" else words


def show(value: float, metric: str) -> str:
    """A metric as people write it."""
    return f"{value:.2f} %" if metric == "accuracy" else f"{value:.4f}"


def size(num_bytes: float) -> str:
    """Bytes with a fitting unit.

    >>> size(999), size(1234), size(5_600_000), size(128_000_000_000)
    ('999 B', '1.23 kB', '5.60 MB', '128 GB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:.{digits}f} {units[0]}"


def clock(seconds: float) -> str:
    """A duration with a fitting unit.

    >>> clock(0.004), clock(4.26), clock(75), clock(7300)
    ('4 ms', '4.3 s', '1:15', '2:01:40')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def comparison_table(results: Results, states: dict[str, str] | None = None, wide: bool = False) -> Table:
    """A row for each strategy; `states` says how far each is while the comparison goes on.

    `between` is what all ranks together sent from node to node, by the ledger; `kernel` the same by its witness.
    """
    example = results.example
    metric = example["metric"] if example else "accuracy"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("strategy", overflow="fold", min_width=14)
    if states is not None:
        table.add_column("progress", no_wrap=True)
    headings = [metric, "training"] + ([f"to {results.target:g}"] if results.target is not None else [])
    headings += ["sent/rank", "between", "waiting"]
    headings += ["best", "kernel", "samples/s", "memory"] if wide else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in results.entries:
        state = [states.get(entry.spec, "")] if states is not None else []
        table.add_row(entry.spec, *state, *_figures(entry, metric, results.target, wide))
    return table


def _figures(entry: Entry, metric: str, target: float | None, wide: bool) -> list[str]:
    if not entry.finished:
        return ["failed" if entry.errors else "–"]
    cells = [
        with_spread(entry.spread("value"), lambda value: show(value, metric)),
        _mean(entry.spread("train_seconds"), clock),
    ]
    if target is not None:
        cells.append(to_target(entry, target))
    cells += [
        _mean(entry.spread("wire_bytes_per_rank"), size),
        _mean(entry.spread(on_link("wire", "between")), size),
        _mean(entry.spread("waiting_share"), lambda share: f"{100 * share:.0f} %"),
    ]
    if wide:
        cells += [
            _mean(entry.spread("best"), lambda value: show(value, metric)),
            _mean(entry.spread(on_link("kernel", "between")), size),
            _mean(entry.spread("samples_per_second"), lambda rate: f"{rate:,.0f}"),
            _mean(entry.spread("peak_memory_bytes"), size),
        ]
    return cells


def to_target(entry: Entry, target: float) -> str:
    """The training time to a target, and how many seeds reached it if not all did."""
    reached = entry.seconds_to(target)
    if reached is None:
        return "not reached"
    missed = len(reached.values) < len(entry.finished)
    return clock(reached.mean) + (f" ({len(reached.values)} of {len(entry.finished)})" if missed else "")


def with_spread(spread: Spread | None, words: Callable[[float], str]) -> str:
    """A mean with its standard deviation, where there is one.

    >>> with_spread(Spread(97.1, 0.2, [96.9, 97.3]), lambda value: f"{value:.2f} %")
    '97.10 ± 0.20 %'
    """
    if spread is None:
        return "–"
    if spread.deviation is None:
        return words(spread.mean)
    mean, _, unit = words(spread.mean).partition(" ")
    deviation = words(spread.deviation).partition(" ")[0]
    return f"{mean} ± {deviation} {unit}".rstrip()


def _mean(spread: Spread | None, words: Callable[[float], str]) -> str:
    return words(spread.mean) if spread is not None else "–"
