"""Does streaming DiLoCo hide the exchange that blocking DiLoCo waits for? Shares of the training time, on one link.

    python benchmarks/streaming.py [--every 8] [--fragments 2] [--epochs 1] [--seeds 1] [--batch-size 1024]
                                   [--link RATE] [--task TASK] [--hosts 2] [--ranks-per-host 1]

Without --link, the computing of a step is timed first, on all ranks at once with nothing sent, and the link is chosen
so that the blocking exchange should take 36 % of the training time. Then `thinwire compare` trains with
`diloco(every=…)`, which waits for each exchange, and with `diloco(every=…, fragments=…)`, which trains on during it. At
the end of each epoch both average all ranks and wait for that. With few steps in an epoch this wait alone would exceed
the goal, so the default is an epoch of 400 steps.
"""

from __future__ import annotations

import argparse

from comparison import between_bytes, compare, compute_seconds, mean, measured_link, print_table

from thinwire.comm.wire_bytes import all_reduce_bytes
from thinwire.netlab import Link

EXCHANGE_SHARE = 0.36  # of the training time, that the blocking exchange should take
TIMED_EPOCHS = 1
MIN_BLOCKING, GOAL = 0.30, 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--task", default="synthetic(samples=819200, width=512)")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--link", help="default: one on which blocking should wait 36 %% of the time")
    report(parser.parse_args())


def report(options: argparse.Namespace) -> None:
    ranks = options.hosts * options.ranks_per_host
    settings = {
        "task": options.task,
        "batch_size": options.batch_size,
        "ranks": ranks,
        "nodes": options.hosts,
    }
    link = options.link
    if link is None:
        compute, parameters = compute_seconds(**settings, epochs=TIMED_EPOCHS)
        wire_bytes = all_reduce_bytes(4 * parameters, ranks)
        exchange = options.every * compute * EXCHANGE_SHARE / (1 - EXCHANGE_SHARE)
        link = str(Link(rate_mbit=round(wire_bytes * 8e-6 / exchange, 1)))
        print(f"{options.task}, {parameters:,} parameters, computing {1e3 * compute:.1f} ms a step; ", end="")
        print(f"{wire_bytes / 1e6:.2f} MB over each link in {1e3 * exchange:.0f} ms")

    blocking = f"diloco(every={options.every})"
    streaming = f"diloco(every={options.every}, fragments={options.fragments})"
    entries = compare([blocking, streaming], **settings, epochs=options.epochs, seeds=options.seeds, link=link)
    print(f"link {link}, {measured_link(entries)}; {ranks} ranks on {options.hosts} hosts, batch ", end="")
    print(f"{options.batch_size} a rank, {options.epochs} epochs, {options.seeds} seed(s)\n")
    rows = [
        [
            entry.spec,
            f"{mean(entry, 'waiting_share'):.1%}",
            f"{mean(entry, 'train_seconds'):.1f} s",
            f"{1e3 * mean(entry, 'train_seconds') / mean(entry, 'steps'):.1f} ms",
            f"{mean(entry, 'value'):.2f} %",
            f"{between_bytes(entry) / 1e6:.0f} MB",
        ]
        for entry in entries.values()
    ]
    print_table(["strategy", "waiting", "training", "a step", "accuracy", "between"], rows)
    print(f"goal: streaming < {GOAL:.0%} where blocking waits ≥ {MIN_BLOCKING:.0%}")


if __name__ == "__main__":
    main()
