"""Results as tables for a terminal, and figures in the words that people use for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from thinwire.records import TRAINING, bytes_of
from thinwire.results import Entry, Figure, Results, Spread, on_link, sent
from thinwire.verdicts import baselines, is_unequal, remarks, speed, times, verdicts

NAME_WIDTH = 18  # that a strategy's name needs at least


def result_table(summary: dict[str, Any], ledgers: list[list[dict[str, Any]]]) -> Group:
    """The end of a run: what it reached, and what all ranks together sent for each purpose."""
    value = show(summary["value"], summary["metric"])
    ranks = f"{summary['ranks']} rank{'s' * (summary['ranks'] != 1)}"
    title = f"{summary['task']} · {summary['strategy']} · {ranks} · {summary['metric']} {value}"
    table = Table(box=box.SIMPLE_HEAD)
    table.padding, table.collapse_padding = (0, 1), True
    words = (
        f"{clock(summary['seconds'])} in all, {clock(summary['train_seconds'])} of it training, "
        f"{100 * summary['waiting_share']:.0f} % of that waiting for the network; "
        f"{summary['parameters']:,} parameters\n{_factored_line(summary)}{_blocks_line(summary)}"
        f"{_sent_line(summary)}"
    )
    if summary["nodes"] > 1 or summary["link"]:
        words += f"\n{network_line(summary)}"
    for heading in ("purpose", "group", "operation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "calls", "payload", "wire", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(_added_up(ledgers), key=lambda row: -row["wire_bytes"]):
        numbers = (f"{row['calls']:,}", size(row["payload_bytes"]), size(row["wire_bytes"]), clock(row["seconds"]))
        table.add_row(row["purpose"], row["link"], row["op"], str(row["ranks"]), *numbers)
    return Group(Text(title, style="italic"), table, Text(words))


def _added_up(ledgers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ledgers of all ranks as one; its times are those of the rank that took longest."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for ledger in ledgers for row in ledger):
        key = tuple(row[name] for name in ("purpose", "link", "op", "ranks"))
        line = lines.setdefault(key, {**row, "calls": 0, "payload_bytes": 0, "wire_bytes": 0, "seconds": 0.0})
        for name in ("calls", "payload_bytes", "wire_bytes"):
            line[name] += row[name]
        line["seconds"] = max(line["seconds"], row["seconds"])
    return list(lines.values())


def _sent_line(summary: dict[str, Any]) -> str:
    sent, ranks = summary["wire_bytes_by_purpose"], summary["ranks"]
    total, training = bytes_of(sent), bytes_of(sent, TRAINING)
    words = f"sent {size(total)} by all ranks, {size(training)} of it in training"
    return f"{words}; {size(total / ranks)} by a rank on average; times are of the slowest" if ranks > 1 else words


def _factored_line(summary: dict[str, Any]) -> str:
    small = summary["factored"]
    if not small:
        return ""
    value = show(small["value"], summary["metric"])
    return (
        f"with low-rank layers as two thin ones: {small['parameters']:,} parameters ({small['ratio']:.1f} : 1), "
        f"{size(small['bytes'])} instead of {size(summary['model_bytes'])}, {summary['metric']} {value}\n"
    )


def _blocks_line(summary: dict[str, Any]) -> str:
    """What blocks cost that train themselves, and how well each would do as the end of the model."""
    flops, backprop = summary.get("flops_per_sample"), summary.get("backprop_flops_per_sample")
    if not flops or not backprop:
        return ""
    words = f"{count_of(flops)} operations to train on a sample, {flops / backprop:.2f} of backpropagation's\n"
    exits = ", ".join(show(exit["value"], summary["metric"]) for exit in summary["exits"])
    return words + (f"{summary['metric']} of early exits, first block first: {exits}\n" if exits else "")


def count_of(number: float) -> str:
    """A large number with a fitting unit.

    >>> count_of(999), count_of(1234), count_of(5_600_000_000)
    ('999', '1.23 k', '5.60 G')
    """
    return size(number).removesuffix("B").strip()


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
    words = f"measured {rate(measured['rate_mbit'])} Mbit/s, {measured['latency_ms']:.2f} ms"
    return f"{words}: OFF by more than 10 %" if summary["link_state"] == "off" else words


def show(value: float, metric: str) -> str:
    """A metric as people write it."""
    return f"{value:.2f} %" if metric == "accuracy" else f"{value:.4f}"


def rate(mbit: float) -> str:
    """A rate in Mbit/s.

    >>> rate(9.78), rate(98.76), rate(8190.3)
    ('9.78', '98.8', '8,190')
    """
    return f"{mbit:,.0f}" if mbit >= 1000 else f"{mbit:.3g}"


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


def comparison_table(results: Results, width: int, states: dict[str, str] | None = None) -> Table:
    """A row for each strategy, with as many figures as there is room for, the most telling first.

    `states` says how far each strategy is, while the comparison goes on. Bytes are those between nodes, by all ranks,
    or on one node those of a rank; `kernel` is what its witness counted between nodes, to hold against "sent in all".
    """
    columns = _columns(results)
    if states is not None:
        columns = {"progress": lambda entry: states[entry.spec], **columns}
    cells = {name: [cell(entry) for entry in results.entries] for name, cell in columns.items()}
    widths = {name: max(map(len, (name, *column))) + 2 for name, column in cells.items()}
    while len(cells) > 2 and sum(widths[name] for name in cells) + NAME_WIDTH > width:
        del cells[list(cells)[-1]]
    room = max(NAME_WIDTH, width - sum(widths[name] for name in cells))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("strategy", overflow="fold", max_width=room)
    for name in cells:
        table.add_column(name, justify="left" if name == "progress" else "right", no_wrap=True)
    for entry, *row in zip(results.entries, *cells.values(), strict=True):
        table.add_row(entry.spec if len(entry.spec) < room else entry.spec.replace("(", "(\n", 1), *row)
    return table


def _columns(results: Results) -> dict[str, Callable[[Entry], str]]:
    """What a column says of a strategy."""
    metric, target = results.metric, results.target

    def value(number: float) -> str:
        return show(number, metric)

    def mean(figure: Figure, words: Callable[[float], str]) -> Callable[[Entry], str]:
        return lambda entry: words(found.mean) if (found := entry.spread(figure)) else "–"

    def against(baseline: Entry) -> Callable[[Entry], str]:
        return lambda entry: times(factor) if (factor := speed(entry, baseline)) else "–"

    measures = {baseline.spec: baseline for baseline in baselines(results)}
    counts = {"updates": "steps", "samples": "samples"}
    work = {name: mean(key, "{:,.0f}".format) for name, key in counts.items() if is_unequal(results, key)}
    return {
        metric: lambda entry: with_spread(entry.spread("value"), value) if entry.finished else _unfinished(entry),
        "training": mean("train_seconds", clock),
        **{f"× {spec}": against(baseline) for spec, baseline in measures.items() if spec == "data_parallel"},
        "sent in training": mean(results.cost, size),
        **{f"× {spec}": against(baseline) for spec, baseline in measures.items() if spec != "data_parallel"},
        **({f"to {target:g}": lambda entry: to_target(entry, target)} if target is not None else {}),
        "waiting": mean("waiting_share", lambda share: f"{100 * share:.0f} %"),
        **work,
        "best": mean("best", value),
        "sent in all": mean(sent(link="between" if results.shares_link else None), size),
        "kernel": mean(on_link("kernel", "between"), size),
        "samples/s": mean("samples_per_second", lambda rate: f"{rate:,.0f}"),
        "memory": mean("peak_memory_bytes", size),
    }


def _unfinished(entry: Entry) -> str:
    return "failed" if entry.errors else "–"


def comparison_lines(results: Results) -> list[str]:
    """What is said below the table: a verdict on each strategy, what is unfair, which bytes, the network."""
    judged = [f"{results.entries[i].spec}: {words}" for i, words in verdicts(results).items()]
    where = "between nodes, by all ranks together" if results.shares_link else "by a rank on average"
    sent = f"sent: {where}; in training, and in all with start, evaluation and checkpoints"
    return [line for line in (*judged, *remarks(results), sent, comparison_caption(results)) if line]


def comparison_caption(results: Results) -> str:
    """The network of a comparison in words: what was asked for, what was measured, and what is wrong with it."""
    found = [record.summary for entry in results.entries for record in entry.finished if record.summary]
    link = found[0]["link"] if found else None
    if link is None:
        return ""
    rates = sorted(one["link_measured"]["rate_mbit"] for one in found if one["link_measured"])
    measured = f", measured {rate(rates[0])}–{rate(rates[-1])} Mbit/s" if rates else ""
    wrong = [f"{state.upper()} in {n} of {len(found)} runs" for state in ("off", "not shaped")
             if (n := sum(one["link_state"] == state for one in found))]  # fmt: skip
    return f"link {link}{measured}" + "".join(f"; {words}" for words in wrong)


def to_target(entry: Entry, target: float) -> str:
    """The training time to a target, and how many seeds reached it if not all did."""
    reached = entry.seconds_to(target)
    if reached is None:
        return "not reached" if entry.finished else "–"
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
