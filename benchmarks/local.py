"""How fast is training with local losses, whose blocks do not wait for each other? Against torch's 1F1B and GPipe.

    python benchmarks/local.py [SPEC …] [--link 100mbit] [--stages 4] [--model vgg8] [--batch-size 64] [--epochs 5]

`thinwire compare` runs twice: with each stage on a host of its own and the link between them, and on one host over
loopback. Pipelines run with several numbers of micro-batches, because the best number depends on the network. Each SPEC
is compared with the best 1F1B and with the best pipeline. All cut the model at the same layers (equal operations).
Samples per second are those of the fastest epoch.
"""

from __future__ import annotations

import argparse
import itertools

from comparison import compare, measured_link, print_table

from thinwire.compare.results import Entry

GOALS = {"link": 1.4, "loopback": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=["local_parallel", "local_parallel(head=conv)"])
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--model", default="vgg8")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    settings = {
        "task": "digits", "model": options.model, "batch_size": options.batch_size // options.stages,
        "ranks": options.stages, "epochs": options.epochs, "seeds": 1,
    }  # fmt: skip
    most = options.batch_size // 2
    one_by_one = [f"pipeline(microbatches={m})" for m in doubling(options.stages, min(most, 8 * options.stages))]
    all_forward = [f"pipeline(schedule=gpipe, microbatches={m})" for m in doubling(1, min(most, 2 * options.stages))]
    specs = [*one_by_one, *all_forward, *options.specs]
    for where, network in (("link", {"link": options.link, "nodes": options.stages}), ("loopback", {})):
        entries = compare(specs, **settings, **network)
        about = f"{options.link}, {measured_link(entries)}" if network else "loopback"
        print(f"\n{options.model}, batch {options.batch_size}, {options.stages} stages, {about}")
        report(entries, one_by_one, options.specs, GOALS[where])


def doubling(least: int, most: int) -> list[int]:
    return list(itertools.takewhile(lambda m: m <= most, (least * 2**i for i in itertools.count())))


def speed(entry: Entry) -> float:
    """Samples per second in the fastest epoch."""
    return max(float(row["samples_per_second"]) for row in entry.finished[0].metrics)


def report(entries: dict[str, Entry], one_by_one: list[str], local: list[str], goal: float) -> None:
    reference = max(speed(entries[spec]) for spec in one_by_one)
    best = max(speed(entry) for spec, entry in entries.items() if spec not in local)
    rows = []
    for spec, entry in entries.items():
        (run,) = entry.finished
        assert run.summary is not None
        found = speed(entry)
        operations, backprop = run.summary["status"]["operations"]
        rows.append([
            spec, f"{found:,.0f}", f"{found / reference:.2f}", f"{found / best:.2f}",
            f"{100 * run.summary['waiting_share']:.0f} %", f"{run.summary['wire_bytes_per_rank'] / 1e6:.1f} MB",
            f"{operations / backprop:.2f}",
        ])  # fmt: skip
    print_table(["strategy", "samples/s", "× best 1F1B", "× best pipeline", "waiting", "sent", "operations"], rows)
    print(f"goal: ≥ {goal} × the best 1F1B")


if __name__ == "__main__":
    main()
