"""thinwire under a real mpirun, on one machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT
from tests.run.test_worker import same_files

SETTINGS = ("--task", "digits", "--epochs", "1", "--seed", "5")


@pytest.mark.timeout(700)
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun: not installed; as root, make cluster installs it")
def test_mpirun_starts_two_ranks_that_end_as_two_that_thinwire_starts(tmp_path: Path) -> None:
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {**os.environ, "PYTHONPATH": python_path, **as_root}
    train = [sys.executable, "-m", "thinwire", "train", *SETTINGS]
    out = tmp_path / "mpirun"
    launcher = ["mpirun", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*launcher, *train, "--out", str(out)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["ranks"] == 2
    here = ["--ranks", "2", "--out", str(tmp_path / "here")]
    subprocess.run([*train, *here], env=env, check=True, timeout=300)
    assert same_files(out, tmp_path / "here")
