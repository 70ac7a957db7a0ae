"""How many bytes and seconds does independent subnet training take on a slow link? Against local SGD, data_parallel.

    python benchmarks/ist.py [--epochs 3] [--every 10] [--noise 3.5] [--link 100mbit] [--target 95] [--no-data-parallel]

The network is the published one, 4096-4096-4096-35, of 33.7 M parameters, on four nodes with one rank each. The task
imitates 35 spoken words: four random prototypes of each in 4096 dimensions, plus noise that is `--noise` times as
large. The bytes of a round are those that a rank sends from one exchange to the next, by the ledger; the published
ratio is 6.4. Seconds are those of training alone, until the test accuracy first reaches the target after an epoch.
data_parallel sends 202 MB a rank and step, and so takes minutes for each epoch of ten steps.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from comparison import compare, mean, measured_link, print_table
from torch.utils.data import TensorDataset

from thinwire.compare.results import Entry
from thinwire.tasks.base import Task

BASE, RANKS = "data_parallel", 4
BATCH_SIZE, NUM_SAMPLES, NUM_TEST, FEATURES, WORDS, PROTOTYPES = 128, 5120, 1024, 4096, 35, 4
GOAL_BYTES, GOAL_SECONDS = 6.0, 10.0


def words(data: Path | None, seed: int, /, *, noise: float = 3.5) -> Task:
    """Noisy prototypes of 35 words."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(WORDS * PROTOTYPES, FEATURES, generator=generator)
    which = torch.randint(0, len(prototypes), (NUM_SAMPLES + NUM_TEST,), generator=generator)
    inputs = prototypes[which] + noise * torch.randn(len(which), FEATURES, generator=generator)
    inputs, labels = inputs / (1 + noise**2) ** 0.5, which // PROTOTYPES
    return Task(
        train=TensorDataset(inputs[:NUM_SAMPLES], labels[:NUM_SAMPLES]),
        test=TensorDataset(inputs[NUM_SAMPLES:], labels[NUM_SAMPLES:]),
        shape=(FEATURES,),
        classes=WORDS,
        model="mlp(width=4096)",
        defaults={"batch_size": BATCH_SIZE, "lr": 0.2, "optimizer": "sgd", "schedule": "constant"},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps in a round; ten are an epoch")
    parser.add_argument("--noise", type=float, default=3.5)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--target", type=float, default=95.0)
    parser.add_argument("--no-data-parallel", action="store_true")
    options = parser.parse_args()
    local, ist = f"local_sgd(every={options.every})", f"ist(local_steps={options.every}, optimizer_state=reset)"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    entries = compare(
        [*([] if options.no_data_parallel else [BASE]), local, ist], task=f"ist:words(noise={options.noise})",
        ranks=RANKS, nodes=RANKS, link=options.link, epochs=options.epochs, seeds=1, target=options.target,
    )  # fmt: skip
    print(f"4096-4096-4096-35, {RANKS} nodes, batch {BATCH_SIZE}, rounds of {options.every}; link ", end="")
    print(f"{options.link}, {measured_link(entries)}\n")
    print_table(
        ["strategy", "accuracy", f"to {options.target:g} %", "training", "sent a step", "peak memory"],
        [row(entry, options.target) for entry in entries.values()],
    )
    ratio = step_bytes(entries[local]) / step_bytes(entries[ist])
    print(f"\nbytes of a round, {local} / ist: {ratio:.2f} (goal {GOAL_BYTES:g}, published 6.4)")
    if BASE in entries:
        slow, fast = (entries[spec].seconds_to(options.target) for spec in (BASE, ist))
        if slow and fast:
            ratio = slow.mean / fast.mean
            print(f"training time to {options.target:g} %, {BASE} / ist: {ratio:.1f} (goal {GOAL_SECONDS:g})")
        else:
            print(f"{options.target:g} % was not reached by both; give more --epochs or a lower --target")


def row(entry: Entry, target: float) -> list[str]:
    reached = entry.seconds_to(target)
    return [
        entry.spec,
        f"{mean(entry, 'value'):.2f} %",
        f"{reached.mean:.1f} s" if reached else "–",
        f"{mean(entry, 'train_seconds'):.1f} s",
        f"{step_bytes(entry) / 1e6:.2f} MB",
        f"{mean(entry, 'peak_memory_bytes') / 1e6:.0f} MB",
    ]


def step_bytes(entry: Entry) -> float:
    """Bytes that a rank sent in training, for each step of whole rounds."""
    (record,) = entry.finished
    last = record.metrics[-1]
    rounds = last.get("round")  # complete ones; the one after them is not over yet
    return last["training_bytes"] / (last["step"] if rounds is None else last["step"] * rounds / (rounds + 1))


if __name__ == "__main__":
    main()
