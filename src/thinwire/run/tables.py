"""The results of one run as a table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.common.formats import format_bytes, format_count, format_metric, format_rate, format_seconds

FILE_WIDTH = 200  # characters: where a table does not go to a terminal, it has room for every column


def output_console() -> Console:
    """Standard output for tables: as wide as the terminal, or with room for every column where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def result_table(summary: dict[str, Any], ledgers: list[list[dict[str, Any]]]) -> Group:
    """The table at the end of a run: its metric, and what all ranks together sent for each purpose."""
    value = format_metric(summary["value"], summary["metric"])
    ranks = f"{summary['ranks']} rank{'s' * (summary['ranks'] != 1)}"
    title = f"{summary['task']} · {summary['strategy']} · {ranks} · {summary['metric']} {value}"
    table = Table(box=box.SIMPLE_HEAD)
    table.padding, table.collapse_padding = (0, 1), True
    words = (
        f"{format_seconds(summary['seconds'])} in all, {format_seconds(summary['train_seconds'])} of it training, "
        f"{100 * summary['waiting_share']:.0f} % of that waiting for the network; "
        f"{summary['parameters']:,} parameters\n{_strategy_lines(summary)}"
        f"{_sent_line(summary)}"
    )
    if summary["nodes"] > 1 or summary["link"]:
        words += f"\n{network_line(summary)}"
    rows = sorted(_sum_ledgers(ledgers), key=lambda row: (row["part"], -row["wire_bytes"]))
    has_parts = any(row["part"] for row in rows)
    for heading in (*(("part",) if has_parts else ()), "purpose", "group", "operation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "calls", "payload", "wire", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        numbers = (
            f"{row['calls']:,}",
            format_bytes(row["payload_bytes"]),
            format_bytes(row["wire_bytes"]),
            format_seconds(row["seconds"]),
        )
        part = [str(row["part"])] if has_parts else []
        table.add_row(*part, row["purpose"], row["link"], row["op"], str(row["ranks"]), *numbers)
    return Group(Text(title, style="italic"), table, Text(words))


def _sum_ledgers(ledgers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ledgers of all ranks as one; times are those of the slowest rank."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for ledger in ledgers for row in ledger):
        key = tuple(row[name] for name in ("part", "purpose", "link", "op", "ranks"))
        line = lines.setdefault(key, {**row, "calls": 0, "payload_bytes": 0, "wire_bytes": 0, "seconds": 0.0})
        for name in ("calls", "payload_bytes", "wire_bytes"):
            line[name] += row[name]
        line["seconds"] = max(line["seconds"], row["seconds"])
    return list(lines.values())


def _sent_line(summary: dict[str, Any]) -> str:
    sent, ranks = summary["wire_bytes_by_purpose"], summary["ranks"]
    total, training = bytes_of(sent), bytes_of(sent, TRAINING)
    words = f"sent {format_bytes(total)} by all ranks, {format_bytes(training)} of it in training"
    return (
        f"{words}; {format_bytes(total / ranks)} by a rank on average; times are those of the slowest rank"
        if ranks > 1
        else words
    )


def _strategy_lines(summary: dict[str, Any]) -> str:
    """Values of the strategy's status, and the artifacts that it made."""
    metric, lines = summary["metric"], []
    for name, series in summary["series"].items():
        if series["draw"] == "column" and (pair := number_and_reference(summary, name)):
            number, reference = pair
            lines.append(f"{series['title']}: {format_count(number)}, {number / reference:.2f} × {series['cell']}")
    for one in summary["artifacts"]:
        lines.append(
            f"{one['file']}, {one['about']}: {one['parameters']:,} parameters ({one['ratio']:.1f} : 1), "
            f"{format_bytes(one['bytes'])} instead of {format_bytes(summary['model_bytes'])}, "
            f"{metric} {format_metric(one['value'], metric)}"
        )
    return "".join(f"{line}\n" for line in lines)


def number_and_reference(summary: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """The value of a series that is drawn as a column; None if the status has none, or something else."""
    value = summary.get("status", {}).get(name)
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(x, int | float) for x in value):
        return None
    return (value[0], value[1]) if value[0] and value[1] else None


def network_line(summary: dict[str, Any]) -> str:
    """Nodes, link and the bytes between nodes, in words."""
    words = [f"{summary['nodes']} nodes" if summary["nodes"] > 1 else "1 node"]
    if summary["link"]:
        words.append(f"link {summary['link']}, {link_words(summary)}")
    elif words_measured := measured_words([summary]):
        words = [words_measured]
    if summary["kernel_bytes_by_link"]:
        ledger, kernel = (summary[f"{who}_bytes_by_link"]["between"] for who in ("wire", "kernel"))
        words.append(f"between nodes {format_bytes(ledger)} by the ledger, {format_bytes(kernel)} by the Linux kernel")
    return "; ".join(words)


def measured_words(summaries: Sequence[Mapping[str, Any]]) -> str:
    """What runs measured between the nodes of a real network, from the lowest to the highest; empty if nothing.

    >>> run = {"nodes": 2, "link_state": "measured", "link_measured": {"rate_mbit": 940.2, "latency_ms": 0.31}}
    >>> measured_words([run]), measured_words([run, {**run, "link_measured": {"rate_mbit": 90, "latency_ms": 0.31}}])
    ('measured: 940 Mbit/s, 0.31 ms between 2 nodes', 'measured: 90–940 Mbit/s, 0.31 ms between 2 nodes')
    """
    found = [one for one in summaries if one["link_state"] == "measured" and one["link_measured"]]
    if not found:
        return ""
    rates = sorted(one["link_measured"]["rate_mbit"] for one in found)
    latencies = sorted(one["link_measured"]["latency_ms"] for one in found)
    rate = "–".join(dict.fromkeys(format_rate(one) for one in (rates[0], rates[-1])))
    latency = "–".join(dict.fromkeys(f"{one:.2g}" for one in (latencies[0], latencies[-1])))
    return f"measured: {rate} Mbit/s, {latency} ms between {found[0]['nodes']} nodes"


def link_words(summary: dict[str, Any]) -> str:
    """What was measured of the link of a run.

    >>> link_words({"link_state": "off", "link_measured": {"rate_mbit": 70.0, "latency_ms": 0.01}})
    'measured 70 Mbit/s, 0.01 ms: OFF by more than 10 %'
    """
    measured = summary["link_measured"]
    if measured is None:
        return "NOT SHAPED"
    words = f"measured {format_rate(measured['rate_mbit'])} Mbit/s, {measured['latency_ms']:.2f} ms"
    return f"{words}: OFF by more than 10 %" if summary["link_state"] == "off" else words
