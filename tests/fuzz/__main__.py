"""make fuzz: many cases of every fuzzer, and a table.

    python -m tests.fuzz [--cases 100000] [--seed 0] [--only NAME …] [--jobs 2]
    python -m tests.fuzz --case specs:123 [--seed 0]

The second repeats one case, and shows its error with a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.fuzz.fuzzers import FUZZERS
from tests.fuzz.harness import Fuzzer, Outcome, lines, one_case, prepared, run, seed_of

HEADS = ["fuzzer", "cases", "accepted", "refused", "crashes", "code executed", "seconds"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of all fuzzers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(FUZZERS), choices=list(FUZZERS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="fuzzers at a time")
    parser.add_argument("--case", metavar="NAME:NUMBER", help="repeat one case")
    options = parser.parse_args()
    if options.case:
        name, _, number = options.case.partition(":")
        return repeat(FUZZERS[name], options.seed, int(number))
    outcomes = run([FUZZERS[name] for name in options.only], options.cases, options.seed, options.jobs, show)
    print(file=sys.stderr)
    print_table(outcomes)
    return 1 if any(one.crashes or one.executed for one in outcomes) else 0


def show(done: int, total: int, seconds: float) -> None:
    """Progress, with the time left."""
    if sys.stderr.isatty() or done == total:
        left = seconds * (total - done) / max(1, done)
        print(f"\r{done:,} of {total:,} cases, {seconds:.0f} s, {left:.0f} s left  ", end="", file=sys.stderr)


def print_table(outcomes: list[Outcome]) -> None:
    """A row for each fuzzer, their sum, and what went wrong with how to repeat it."""
    total = Outcome("all", *(sum(getattr(one, name) for one in outcomes) for name in ("cases", "accepted", "refused")))
    for one in outcomes:
        total.crashes += one.crashes
        total.executed += one.executed
        total.seconds += one.seconds
    rows = [HEADS, *lines([*outcomes, total])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    for row in rows:
        print(
            "  ".join(
                cell.ljust(width) if not i else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )
    for found in [*total.crashes, *total.executed]:
        print(found)
    if total.crashes or total.executed:
        print("to repeat one: python -m tests.fuzz --case NAME:NUMBER")


def repeat(fuzzer: Fuzzer, seed: int, number: int) -> int:
    """One case, in this process."""
    with prepared(fuzzer) as (case, guard):
        is_accepted = one_case(fuzzer, case, guard, seed_of(fuzzer.name, seed, number))
    print("accepted" if is_accepted else "refused with a message")
    return 0


if __name__ == "__main__":
    sys.exit(main())
