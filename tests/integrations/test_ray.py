"""thinwire in Ray Train: what our own trainer computes and sends, and a killed worker that Ray restores."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

import thinwire as tw
from tests.programs import ROOT
from tests.ray_environment import ray_environment
from tests.training import PLAIN, same, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm

pytest.importorskip("ray.train", reason="needs the extra thinwire[ray]; make ray installs it")

from tests import ray_runs

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of tests.ray_runs."""
    folder = tmp_path_factory.mktemp("ray")
    with ray_environment() as environment:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.ray_runs", folder], cwd=ROOT, env=environment, capture_output=True,
            text=True, timeout=800, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-6000:]
    return folder


def result(folder: Path, rank: int) -> tuple[dict[str, Any], Any]:
    return load_file(folder / f"{rank}.safetensors"), json.loads((folder / f"{rank}.json").read_text())


def by_prepare(comm: Comm, spec: str) -> tuple[Any, int]:
    model = copy.deepcopy(PLAIN)
    trainer = tw.prepare(spec, model=model, comm=comm, loss=nn.functional.cross_entropy, optimizer=ray_runs.sgd)
    for _ in range(ray_runs.EPOCHS):
        for batch in ray_runs.data(comm.rank):
            trainer.step(batch)
    trainer.end_epoch()
    return weights(model), sum(row["wire_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train")


@pytest.mark.parametrize("case", ray_runs.SPECS)
def test_it_trains_and_sends_what_our_own_trainer_does(process_world: ProcessWorlds, runs: Path, case: str) -> None:
    spec = ray_runs.SPECS[case]
    ours = process_world.run(by_prepare, 2, f"data_parallel(reducer={spec})" if case == "attach" else spec)
    for rank, (mine, sent) in enumerate(ours):
        found, told = result(runs / f"{case}-plain", rank)
        assert same(found, mine)
        assert told == {"sent": sent, "steps": 12, "ranks": 2, "standing": True}


@pytest.mark.parametrize("case", ray_runs.KILLED_CASES)
def test_a_run_whose_worker_was_killed_ends_bit_for_bit_as_the_one_that_went_on(runs: Path, case: str) -> None:
    saved = next((runs / f"run-{case}").glob("checkpoint_*"))
    files = sorted(path.name for path in (saved / "thinwire").iterdir())
    assert files == ["rank-0.safetensors", "rank-1.safetensors"]
    first = result(runs / f"{case}-whole", 0)[0]
    for rank in range(2):
        whole, (restored, told) = result(runs / f"{case}-whole", rank)[0], result(runs / f"{case}-killed", rank)
        assert told["steps"] == 4  # it went on, and did not begin anew
        assert same(whole, restored)
        assert same(restored, first)
