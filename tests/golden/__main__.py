"""Run the golden runs, show what differs from the files, and rewrite those that differ: python -m tests.golden"""

from __future__ import annotations

import difflib
import sys

import torch

from tests.golden.runs import FILES, as_text, names, record
from tests.worlds import ProcessWorlds

torch.set_num_threads(1)


def main() -> None:
    """Say what changed in each file."""
    processes = ProcessWorlds()
    try:
        for name in sys.argv[1:] or names():
            path = FILES / f"{name}.json"
            before, after = path.read_text() if path.exists() else "", as_text(record(name, processes))
            if before == after:
                print(f"{name}: as it was")
                continue
            path.write_text(after)
            print(f"{name}: {'rewritten' if before else 'new'}")
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=0))
    finally:
        processes.close()


if __name__ == "__main__":
    main()
