"""The README's table and picture, from the results.json that a comparison wrote.

    thinwire compare data_parallel "data_parallel(reducer=maxnorm(bits=4))" diloco \
        "daso(warmup_epochs=1, cooldown_epochs=1)" --task cifar10 --data DATA --autocast --epochs 8 --ranks 4 \
        --nodes 2 --link 1gbit --seeds 1 --baseline none --out runs/readme
    python benchmarks/readme.py runs/readme/results.json

It writes what it needs of them to docs/readme.json, draws docs/readme.svg and prints the table. `tests/test_docs.py`
compares the table in the README with docs/readme.json.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
KEPT = ("task", "model", "ranks", "nodes", "link", "versions", "strategies")  # of results.json
KEPT_OF_STRATEGY = (
    "strategy", "epochs", "link_measured", "train_seconds", "waiting_share", "value", "training_bytes_between",
)  # fmt: skip
STYLE = """text { font: 13px sans-serif; fill: #333 } .title { font-weight: bold } .computing { fill: #2a78d6 }
.waiting { fill: #e0a33e } @media (prefers-color-scheme: dark) { text { fill: #ddd } }"""
LEFT, WIDTH, ROW = 310, 880, 34


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """What the table needs of results.json: no command, which would name folders of a machine."""
    found = {key: results[key] for key in KEPT}
    return found | {"strategies": [{name: one[name] for name in KEPT_OF_STRATEGY} for one in found["strategies"]]}


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What the table says of each strategy."""
    found = []
    for one in results["strategies"]:
        epochs = one["epochs"][0]
        found.append(
            {
                "strategy": one["strategy"],
                "seconds": one["train_seconds"]["mean"] / epochs,
                "waiting": one["waiting_share"]["mean"],
                "gigabytes": one["training_bytes_between"]["mean"] / epochs / 1e9,
                "accuracy": one["value"]["mean"],
            }
        )
    return found


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| strategy | seconds an epoch | waiting for the network | sent between nodes an epoch | accuracy |"]
    lines += ["|---|--:|--:|--:|--:|"]
    lines += [
        f"| `{row['strategy']}` | {row['seconds']:.1f} | {100 * row['waiting']:.0f} % | {row['gigabytes']:.2f} GB | "
        f"{row['accuracy']:.2f} % |"
        for row in rows(results)
    ]
    return "\n".join(lines)


def picture(results: dict[str, Any]) -> str:
    """Seconds an epoch as bars: computing, and waiting for the network."""
    found = rows(results)
    per_second = (WIDTH - LEFT - 150) / max(row["seconds"] for row in found)
    parts = [f'<text class="title" x="0" y="16">Seconds an epoch: {escape(about(results))}</text>']
    for i, row in enumerate(found):
        y = 32 + ROW * i
        waiting = row["waiting"] * row["seconds"] * per_second
        computing = row["seconds"] * per_second - waiting
        parts += [
            f'<text x="0" y="{y + 16}">{escape(row["strategy"])}</text>',
            f'<rect class="computing" x="{LEFT}" y="{y}" width="{computing:.1f}" height="22"/>',
            f'<rect class="waiting" x="{LEFT + computing:.1f}" y="{y}" width="{waiting:.1f}" height="22"/>',
            f'<text x="{LEFT + computing + waiting + 8:.1f}" y="{y + 16}">{row["seconds"]:.1f} s, '
            f"{row['accuracy']:.2f} %</text>",
        ]
    y = 32 + ROW * len(found)
    parts += [
        f'<rect class="computing" x="{LEFT}" y="{y}" width="12" height="12"/>'
        f'<text x="{LEFT + 18}" y="{y + 11}">computing</text>',
        f'<rect class="waiting" x="{LEFT + 110}" y="{y}" width="12" height="12"/>'
        f'<text x="{LEFT + 128}" y="{y + 11}">waiting for the network</text>',
    ]
    height = y + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def about(results: dict[str, Any]) -> str:
    """What was trained, and where."""
    return (
        f"{results['model']} on {results['task']}, {results['ranks']} ranks on {results['nodes']} nodes, "
        f"{results['link']} between them"
    )


if __name__ == "__main__":
    results = kept(json.loads(Path(sys.argv[1]).read_text()))
    (DOCS / "readme.json").write_text(json.dumps(results, indent=1) + "\n")
    (DOCS / "readme.svg").write_text(picture(results))
    print(table(results))
