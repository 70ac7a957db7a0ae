"""The scripts in examples/ run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*options: str) -> tuple[list[float], str, int]:
    """Losses, whether ranks are equal, and bytes between nodes, of the FSDP2 loop on two nodes of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "sharded_loop.py"), "--nodes", "2", *options],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    end = re.search(r"ranks are (.+); ([\d,]+) bytes", done.stdout)
    assert end is not None
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)], end[1], int(end[2].replace(",", ""))


@pytest.mark.parametrize(
    ("option", "spec", "most_bytes"),
    [
        ("--reducer", "error_feedback(maxnorm(bits=4))", 30_120_960 / 7),
        ("--rounds", "diloco(every=4)", 30_120_960 / 3.9),
    ],
)
def test_a_sharded_loop_learns_and_sends_little_between_nodes(option: str, spec: str, most_bytes: float) -> None:
    losses, equality, sent = run(option, spec)
    assert losses[-1] < losses[0] / 5
    assert equality == "equal"
    assert sent < most_bytes  # of the 30,120,960 of the exact mean, a gradient of 62,752 parameters in 60 steps
