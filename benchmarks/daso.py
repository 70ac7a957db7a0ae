"""How long does DASO train where a blocking exchange takes as long as computing? Against data_parallel, same epochs.

    python benchmarks/daso.py [SPEC …] [--epochs 40] [--seeds 1] [--model resnet32] [--batch-size 16]
                              [--nodes 2] [--ranks-per-node 2] [--link RATE]

First the computing of a step is timed, on all ranks at once, with nothing sent. Then the link between the nodes is
chosen so that the exchange of a data_parallel step, in float32, takes as long: of a ring of n ranks one edge leaves
each node, and 2(n−1)/n·4P bytes pass over it. On that link `thinwire compare` trains with data_parallel and with each
SPEC, and their summaries are compared. The phases are those of DASO: the first and last four epochs, in which nodes
wait for each other after every batch, and the epochs between. Seconds are those of training alone. Seconds of a step
are those of the median epoch of a phase, so that a moment in which the machine was busy does not count.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

from comparison import between_bytes, compare, compute_seconds, mean, measured_link, print_table

from thinwire.comm.wire_bytes import all_reduce_bytes
from thinwire.compare.results import Entry
from thinwire.netlab import Link

BASE = "data_parallel"
BLOCKING_EPOCHS = 4  # at the start, and again at the end: DASO's defaults
TIMED_EPOCHS = 4
GOAL_RATIO, GOAL_POINTS = 0.66, 0.7


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=["daso", "daso(merge=delta)"])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--link", help="default: one on which the exchange takes as long as computing")
    options = parser.parse_args()
    report(options)


def report(options: argparse.Namespace) -> None:
    ranks = options.nodes * options.ranks_per_node
    settings = {
        "task": "digits",
        "model": options.model,
        "batch_size": options.batch_size,
        "ranks": ranks,
        "nodes": options.nodes,
    }
    compute, parameters = compute_seconds(**settings, epochs=TIMED_EPOCHS)
    wire_bytes = all_reduce_bytes(4 * parameters, ranks)
    link = options.link or str(Link(rate_mbit=round(wire_bytes * 8e-6 / compute, 1)))
    print(f"{options.model}, {parameters:,} parameters, batch {options.batch_size} a rank, {ranks} ranks on ", end="")
    print(f"{options.nodes} nodes, {options.epochs} epochs, {options.seeds} seed(s)")
    print(f"computing {1e3 * compute:.0f} ms a step; {wire_bytes / 1e6:.2f} MB a step over each link, {link}")

    specs = [BASE, *(spec for spec in options.specs if spec != BASE)]
    entries = compare(specs, **settings, epochs=options.epochs, seeds=options.seeds, link=link)
    print(f"link {measured_link(entries)}\n")
    print_table(
        ["strategy", "training", f"× {BASE}", "accuracy", "difference", "waiting", "between", f"× {BASE}"],
        [row(entry, entries[BASE]) for entry in entries.values()],
    )
    print(f"goal: training ≤ {GOAL_RATIO} × {BASE}, accuracy within {GOAL_POINTS} points\n")
    cooldown = options.epochs - BLOCKING_EPOCHS
    phases = {"first": (0, BLOCKING_EPOCHS), "middle": (BLOCKING_EPOCHS, cooldown), "last": (cooldown, options.epochs)}
    print_table(
        [
            "ms a step (of them waiting), median epoch",
            *(f"{name} {end - begin} epochs" for name, (begin, end) in phases.items()),
        ],
        [[entry.spec, *(phase(entry, *epochs) for epochs in phases.values())] for entry in entries.values()],
    )


def row(entry: Entry, base: Entry) -> list[str]:
    """The row of a strategy: its results, and their ratios to those of data_parallel."""
    seconds, value, sent = mean(entry, "train_seconds"), mean(entry, "value"), between_bytes(entry)
    return [
        entry.spec,
        f"{seconds:.1f} s",
        f"{seconds / mean(base, 'train_seconds'):.3f}",
        f"{value:.2f} %",
        f"{value - mean(base, 'value'):+.2f}",
        f"{mean(entry, 'waiting_share'):.1%}",
        f"{sent / 1e6:.0f} MB",
        f"{sent / between_bytes(base):.3f}",
    ]


def phase(entry: Entry, begin: int, end: int) -> str:
    """The time of a step in the median epoch of a phase, and how much of it was waiting, in ms."""
    steps, waits = [], []
    for record in entry.finished:
        rows = [{"step": 0, "train_seconds": 0.0, "waiting_seconds": 0.0}, *record.metrics]
        for before, after in itertools.pairwise(rows[begin : end + 1]):
            count = after["step"] - before["step"]
            steps.append(1e3 * (after["train_seconds"] - before["train_seconds"]) / count)
            waits.append(1e3 * (after["waiting_seconds"] - before["waiting_seconds"]) / count)
    return f"{statistics.median(steps):.0f} ({statistics.median(waits):.0f})" if steps else "–"


if __name__ == "__main__":
    main()
