"""Write what docs/results.json says of accuracy into the package, where `thinwire plan` and `auto` read it.

python benchmarks/measured.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from thinwire.plan.measured import FILE, compare_cells

TRAINING_IMAGES = 50_000  # of CIFAR-10
RESULTS = Path(__file__).parent.parent / "docs" / "results.json"


def cells() -> list[dict]:
    """The cells of results.json, with one text for all that decides a run besides strategy and seed.

    Those of one rank are left out: nothing is exchanged there.
    """
    rows = json.loads(RESULTS.read_text())["cells"]
    return [{**row, "setting": setting(row), "updates": updates(row)} for row in rows if row["ranks"] > 1]


def updates(row: dict) -> int:
    """The number of updates of a run of the page."""
    images = row["train"] or TRAINING_IMAGES - row["held_out"]
    return row["epochs"] * math.ceil(images / (row["ranks"] * row["batch_size"]))


def setting(row: dict) -> str:
    """All that decides a run of the page besides strategy and seed."""
    images = (
        " of 4,000 images"
        if row["scale"] == "small"
        else f" without {row['held_out']:,} images"
        if row["held_out"]
        else ""
    )
    optimizer = row["optimizer"].partition("(")[0]
    update = f"{row['ranks']} ranks, {row['ranks'] * row['batch_size']} images an update"
    return f"CIFAR-10{images}, {row['model']}, {optimizer} at {row['lr']:g}, {update}, {row['epochs']} epochs"


def text() -> str:
    """The file's text."""
    return json.dumps(compare_cells(cells()), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    print(FILE)
