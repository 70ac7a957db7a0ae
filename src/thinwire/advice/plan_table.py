"""A plan as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.advice.plan import Option, Plan
from thinwire.advice.ranking import LOSS_ALLOWED, chosen
from thinwire.common.formats import format_bytes, format_seconds
from thinwire.plan.measured import REFERENCE

WIDEST = 1000  # characters of a table, whatever the terminal has


def print_plan(plan: Plan, console: Console) -> None:
    """Print a table for each link, what was left out, and what the figures rest on."""
    config, about = plan.config, plan.about
    nodes = config.nodes or config.ranks
    for link, options in zip(plan.links, plan.options, strict=True):
        title = f"{config.task} on {config.ranks} ranks and {nodes} nodes, each with a link of {link}"
        _print_table(title, options, console)
        for line in advice(options):
            console.print(line, highlight=False)
    for reason in plan.left_out.values():
        console.print(f"left out: {escape(reason)}", style="dim", highlight=False)
    how = "timed on this machine" if about["is_timed"] else "estimated by its operations"
    console.print(
        f"{about['parameters']:,} parameters; computing {how}. Accuracy is told only where it was measured.",
        style="dim", highlight=False,
    )  # fmt: skip


def _print_table(title: str, options: list[Option], console: Console) -> None:
    """Print a table whose cells are whole; where specs do not fit, rows have numbers, and the specs follow."""
    specs = [option.forecast.strategy for option in options]
    table = _table(title, options, specs)
    fits = _width(table, console) <= console.width
    if not fits:
        table = _table(title, options, [str(number) for number in range(1, len(specs) + 1)])
    table.width = _width(table, console)  # also on a terminal that is narrower: it folds lines
    console.print(table, crop=False)
    for number, spec in enumerate([] if fits else specs, 1):
        console.print(f"{number:>3}  {escape(spec)}", highlight=False, soft_wrap=True)
    if not fits:
        console.print()


def _width(table: Table, console: Console) -> int:
    """How many characters wide a table is if none of its cells is cut."""
    return console.measure(table, options=console.options.update(max_width=WIDEST)).maximum


def _table(title: str, options: list[Option], names: list[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    for heading in ("a step", "an\nepoch", "waiting", "sent\na step", "between\nnodes", "memory", "accuracy\n(points)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for option, name in zip(options, names, strict=True):
        f = option.forecast
        table.add_row(
            escape(name), seconds_text(f.seconds_per_step), seconds_text(f.seconds_per_epoch),
            f"{f.waiting_share:.0%}", format_bytes(round(f.kernel_bytes_per_step)),
            format_bytes(round(f.between_bytes_per_step)), format_bytes(f.memory_bytes),
            points_text([quality.points for quality in option.measured]) or nothing_measured(f.strategy),
        )  # fmt: skip
    return table


def points_text(points: Sequence[float]) -> str:
    """What was measured: the lowest and the highest.

    >>> points_text([-1.71, 0.3, -0.2]), points_text([0.9]), points_text([])
    ('-1.7 … +0.3', '+0.9', '')
    """
    ends = dict.fromkeys(f"{end:+.1f}" for end in ([min(points), max(points)] if points else []))
    return " … ".join(ends)


def nothing_measured(strategy: str) -> str:
    """What to say of the accuracy of a strategy that was not compared with data_parallel."""
    return "exact" if strategy == REFERENCE else "not measured"


def advice(options: list[Option]) -> list[str]:
    """Which option is fastest, and which is the fastest of those that were measured to keep the accuracy."""
    fastest, safe = options[0], chosen(options)
    lines = [f"fastest: [bold]{escape(fastest.forecast.strategy)}[/bold], {escape(fastest.why)}"]
    if safe is not None and safe is not fastest:
        found = safe.measured[0] if safe.measured else "exact"
        lines.append(
            f"fastest that lost at most {LOSS_ALLOWED} points where it was measured: "
            f"[bold]{escape(safe.forecast.strategy)}[/bold] ({escape(str(found))}), {escape(safe.why)}"
        )
    return lines


def seconds_text(seconds: float) -> str:
    """A duration with three digits if it is less than a second."""
    return format_seconds(seconds) if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
