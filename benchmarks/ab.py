"""How small does AB-training make VGG16 on CIFAR-10, and how many bytes does it send?

    python benchmarks/ab.py --data DIR [SPEC …] [--epochs 8] [--ranks 4] [--nodes 2] [--batch-size 128] [--seeds 1]
                            [--model "vgg16(classifier=4096, places=7)"]

The model is the published one, 134 M parameters for images of 32×32; the optimizer is that of the authors, who train
for 150 epochs on 8 ranks and report 44.14 : 1:

    python benchmarks/ab.py --data DIR "ab(group_size=4, sync_every=759, warmup=4330, joint=0)" --epochs 150 --ranks 8

To compare accuracy and bytes with data parallelism, give data_parallel as a SPEC too.
"""

from __future__ import annotations

import argparse

from comparison import between_bytes, compare, mean, print_table

from thinwire.common.formats import format_bytes, format_seconds
from thinwire.compare.results import Entry

AUTHORS = {"optimizer": "adamw(weight_decay=0.1)", "lr": 0.003, "clip_norm": 1, "schedule": "cosine(warmup_epochs=1)"}
PUBLISHED_RATIO = 44.14


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=["ab"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="vgg16(classifier=4096, places=7)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1)
    options = vars(parser.parse_args())
    entries = compare(options.pop("specs"), task="cifar10", autocast=True, **AUTHORS, **options)
    print(f"{options['model']}, {options['ranks']} ranks on {options['nodes']} nodes, {options['epochs']} epochs")
    print_table(
        [
            "strategy",
            "accuracy",
            "training",
            "sent a rank",
            "between nodes",
            "parameters",
            "factored",
            "ratio",
            "accuracy",
        ],
        [row(entry) for entry in entries.values()],
    )
    print(f"published: {PUBLISHED_RATIO} : 1 after 150 epochs")


def row(entry: Entry) -> list[str]:
    smallest = [one for record in entry.finished if record.summary for one in record.summary["artifacts"]]
    cells = [entry.spec, f"{mean(entry, 'value'):.2f} %", format_seconds(mean(entry, "train_seconds"))]
    cells += [
        format_bytes(mean(entry, "wire_bytes_per_rank")),
        format_bytes(between_bytes(entry)),
        f"{mean(entry, 'parameters'):,.0f}",
    ]
    if not smallest:
        return [*cells, "", "", ""]
    parameters, ratio, value = (
        sum(one[key] for one in smallest) / len(smallest) for key in ("parameters", "ratio", "value")
    )
    return [*cells, f"{parameters:,.0f}", f"{ratio:.1f} : 1", f"{value:.2f} %"]


if __name__ == "__main__":
    main()
