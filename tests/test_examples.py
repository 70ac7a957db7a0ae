"""The scripts in examples/ do what their first lines say."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from examples import sharded_loop
from tests.frameworks import FEEDBACK, launched
from tests.programs import PYTHON, ROOT
from tests.ray_environment import ray_environment
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm

EXACT_BYTES = 2 * 4 * 62_752 * 60  # of a gradient, from each of two nodes, in 60 steps


def on_two_nodes(comm: Comm, reducer: str, rounds: str) -> tuple[list[float], bool, int]:
    return sharded_loop.train(2, 60, reducer, rounds)


@pytest.mark.parametrize(
    ("reducer", "rounds", "sent"),
    [("error_feedback(maxnorm(bits=4))", "", EXACT_BYTES / 7.65), ("", "diloco(every=4)", EXACT_BYTES / 4)],
)
def test_a_sharded_loop_learns_and_sends_little_between_nodes(
    process_world: ProcessWorlds, reducer: str, rounds: str, sent: float
) -> None:
    for losses, are_equal, sent_bytes in process_world.run(on_two_nodes, 4, reducer, rounds):
        assert losses[-1] < losses[0] / 10
        assert are_equal
        assert sent_bytes == pytest.approx(sent, rel=0.01)


# ---- in frameworks: two epochs of 30 steps on two ranks

CASES = [(FEEDBACK, False, 60 / 7.65), ("diloco(every=8)", True, 8)]  # gradients that a rank sends in all
NEEDS = {
    "accelerate": ("accelerate", "transformers"),
    "huggingface": ("transformers", "accelerate"),
    "lightning": ("lightning", "transformers"),
}


def with_framework(comm: Comm, framework: str, spec: str, in_rounds: bool) -> dict[str, Any]:
    with launched(comm):
        found: dict[str, Any] = importlib.import_module(f"examples.{framework}_loop").train(spec, in_rounds)
        return found


@pytest.mark.parametrize(("spec", "in_rounds", "gradients"), CASES)
@pytest.mark.parametrize("framework", NEEDS)
def test_a_loop_in_a_framework_learns_and_sends_little(
    process_world: ProcessWorlds, framework: str, spec: str, in_rounds: bool, gradients: float
) -> None:
    if not all(find_spec(name) for name in NEEDS[framework]):  # to import them here would change the environment
        pytest.skip(f"needs the packages {' and '.join(NEEDS[framework])}")
    for found in process_world.run(with_framework, 2, framework, spec, in_rounds):
        assert found["losses"][0] > 5
        assert found["losses"][-1] < 2.5
        assert found["ranks are equal"]
        assert found["bytes"] / found["bytes of one gradient"] == pytest.approx(gradients, rel=0.02)


@pytest.mark.usefixtures("program_server")
@pytest.mark.parametrize("framework", NEEDS)
def test_the_same_script_runs_without_torchrun(framework: str) -> None:
    if not all(find_spec(name) for name in NEEDS[framework]):
        pytest.skip(f"needs the packages {' and '.join(NEEDS[framework])}")
    for arguments in (["maxnorm"], ["diloco(every=8)", "--rounds"]):
        ran = subprocess.run(
            [*PYTHON, "-m", f"examples.{framework}_loop", *arguments], cwd=ROOT, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-6000:]
        assert "ranks are equal; each sent 0 bytes" in ran.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("spec", "in_rounds"), [case[:2] for case in CASES])
def test_a_loop_in_ray_learns(spec: str, in_rounds: bool) -> None:
    if not find_spec("ray"):
        pytest.skip("needs the extra thinwire[ray]; make ray installs it")
    with ray_environment() as environment:
        ran = subprocess.run(
            [sys.executable, "-m", "examples.ray_loop", spec, *(["--rounds"] if in_rounds else [])], cwd=ROOT,
            env=environment, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-6000:]
    told = re.search(r"loss ([\d.]+) to ([\d.]+); ranks are equal; each sent [\d,]+ bytes", ran.stdout)
    assert told, ran.stdout
    assert float(told[1]) > 5
    assert float(told[2]) < 2.5
