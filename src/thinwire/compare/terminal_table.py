"""The results of a comparison in a terminal: the table, and the lines below it."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.table import Table
from rich.text import Text

from thinwire.common.formats import format_bytes, format_metric, format_rate, format_seconds
from thinwire.compare.results import Entry, Measure, Results, Spread, on_link, sent
from thinwire.compare.verdicts import baseline_specs, is_unequal, remarks, speed_against, times, verdicts
from thinwire.run.tables import measured_words

MIN_NAME_WIDTH = 18  # characters of the first column


def comparison_table(results: Results, width: int, states: dict[str, str] | None = None) -> Table:
    """A row for each strategy, with as many columns as fit into `width`, the most important first.

    `states` says how far each strategy is while the comparison runs. Bytes are those between nodes by all ranks, or on
    one node those of a rank on average. The column "kernel" is what the Linux kernel counted between nodes, to check
    "sent in all" against.
    """
    columns = _columns(results)
    if states is not None:
        columns = {"progress": lambda entry: states[entry.spec], **columns}
    cells = {name: [cell(entry) for entry in results.entries] for name, cell in columns.items()}
    widths = {name: max(map(len, (name, *column))) + 2 for name, column in cells.items()}
    while len(cells) > 2 and sum(widths[name] for name in cells) + MIN_NAME_WIDTH > width:
        del cells[list(cells)[-1]]
    room = max(MIN_NAME_WIDTH, width - sum(widths[name] for name in cells))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("strategy", overflow="fold", max_width=room)
    for name in cells:
        table.add_column(name, justify="left" if name == "progress" else "right", no_wrap=True)
    for entry, *row in zip(results.entries, *cells.values(), strict=True):
        name = entry.name if len(entry.name) < room else entry.name.replace("(", "(\n", 1)
        table.add_row(Text(name), *map(Text, row))  # as text, because rich takes words in brackets for styles
    return table


def _columns(results: Results) -> dict[str, Callable[[Entry], str]]:
    """For each column, by its heading, the function that returns the cell of a strategy."""
    metric, target = results.metric, results.target

    def value(number: float) -> str:
        return format_metric(number, metric)

    def mean(measure: Measure, form: Callable[[float], str]) -> Callable[[Entry], str]:
        return lambda entry: form(found.mean) if (found := entry.spread(measure)) else "–"

    def speed_of(spec: str) -> Callable[[Entry], str]:
        return lambda entry: times(factor) if (factor := speed_against(results, entry, spec)) else "–"

    references = baseline_specs(results)
    counts = {"updates": "steps", "samples": "samples"}
    work = {name: mean(key, "{:,.0f}".format) for name, key in counts.items() if is_unequal(results, key)}
    return {
        metric: lambda entry: with_spread(entry.spread("value"), value) if entry.finished else _unfinished(entry),
        "training": mean("train_seconds", format_seconds),
        **{f"× {spec}": speed_of(spec) for spec in references if spec == "data_parallel"},
        "sent in training": mean(results.cost, format_bytes),
        **{f"× {spec}": speed_of(spec) for spec in references if spec != "data_parallel"},
        **({f"to {target:g}": lambda entry: to_target(entry, target)} if target is not None else {}),
        "waiting": mean("waiting_share", lambda share: f"{100 * share:.0f} %"),
        **work,
        "best": mean("best", value),
        "sent in all": mean(sent(link="between" if results.shares_link else None), format_bytes),
        "kernel": mean(on_link("kernel", "between"), format_bytes),
        "samples/s": mean("samples_per_second", lambda rate: f"{rate:,.0f}"),
        "memory": mean("peak_memory_bytes", format_bytes),
    }


def _unfinished(entry: Entry) -> str:
    return "failed" if entry.errors else "–"


def comparison_lines(results: Results) -> list[str]:
    """The lines below the table: a verdict on each strategy, remarks, which bytes are meant, the network."""
    sentences = [f"{results.entries[i].name}: {words}" for i, words in verdicts(results).items()]
    where = "between nodes, by all ranks together" if results.shares_link else "by a rank on average"
    sent = f"sent: {where}; in training, and in all with start, evaluation and checkpoints"
    return [line for line in (*sentences, *remarks(results), sent, *_captions(results)) if line]


def _captions(results: Results) -> list[str]:
    """The network of each folder."""
    if not results.parts:
        return [comparison_caption(results)]
    return [f"{name}: {words}" for name, part in results.parts.items() if (words := comparison_caption(part))]


def comparison_caption(results: Results) -> str:
    """The link that was asked for, the measured rates, and in how many runs it was off; or what there is in its place.

    Empty if nodes have a network of which nothing is known.
    """
    found = results.summaries
    link = found[0]["link"] if found else None
    if link is None:
        is_one_node = bool(found) and found[0]["nodes"] == 1 < found[0]["ranks"]
        return measured_words(found) or ("all ranks are on one node, with no network between them" * is_one_node)
    rates = sorted(one["link_measured"]["rate_mbit"] for one in found if one["link_measured"])
    measured = f", measured {format_rate(rates[0])}–{format_rate(rates[-1])} Mbit/s" if rates else ""
    problems = [f"{state.upper()} in {n} of {len(found)} runs" for state in ("off", "not shaped")
             if (n := sum(one["link_state"] == state for one in found))]  # fmt: skip
    return f"link {link}{measured}" + "".join(f"; {words}" for words in problems)


def to_target(entry: Entry, target: float) -> str:
    """The training time to a target, and how many seeds reached it, unless all did."""
    reached = entry.seconds_to(target)
    if reached is None:
        return "not reached" if entry.finished else "–"
    missed = len(reached.values) < len(entry.finished)
    return format_seconds(reached.mean) + (f" ({len(reached.values)} of {len(entry.finished)})" if missed else "")


def with_spread(spread: Spread | None, form: Callable[[float], str]) -> str:
    """A mean with its standard deviation, if there is one; `form` turns a number into text.

    >>> with_spread(Spread(97.1, 0.2, [96.9, 97.3]), lambda value: f"{value:.2f} %")
    '97.10 ± 0.20 %'
    """
    if spread is None:
        return "–"
    if spread.deviation is None:
        return form(spread.mean)
    mean, _, unit = form(spread.mean).partition(" ")
    deviation = form(spread.deviation).partition(" ")[0]
    return f"{mean} ± {deviation} {unit}".rstrip()
