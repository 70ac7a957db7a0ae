"""The files for clusters name what exists: images, commands, variables, files. make cluster runs what can be run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import programs
from tests.comm.test_store import free_port
from thinwire.cli import app
from thinwire.config import RunConfig
from thinwire.run.records import RunFolder

ROOT = Path(__file__).parent.parent
KUBERNETES = ROOT / "examples" / "kubernetes"
IMAGE = re.compile(r"[a-z0-9./-]+:\d+\.\d+")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def settings(words: list[str]) -> RunConfig:
    """What thinwire train makes of its arguments."""
    _, bound, _ = app.parse_args(["train", *words], exit_on_error=False, print_error=False)
    config: RunConfig = bound.kwargs["settings"]
    return config


def mounted(pod: dict[str, Any]) -> list[str]:
    """Where a pod's volumes are mounted; each is declared."""
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    return [mount["mountPath"] for mount in container["volumeMounts"]]


def pytorchjob() -> tuple[dict[str, Any], dict[str, Any]]:
    (job,) = documents("pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    return replicas["Master"], replicas["Worker"]


def test_a_pytorchjob_has_one_rank_in_each_pod() -> None:
    master, worker = pytorchjob()
    assert master["template"] == worker["template"]
    assert (master["replicas"], master["restartPolicy"], worker["restartPolicy"]) == (1, "OnFailure", "OnFailure")
    pod = master["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert IMAGE.fullmatch(container["image"])
    assert container["command"][:2] == ["thinwire", "train"]
    config = settings(container["command"][2:] + container["args"])
    assert config.resume
    assert str(config.out).startswith(mounted(pod)[0])
    assert {one["name"]: one["value"] for one in container["env"]} == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.usefixtures("program_server")
def test_the_pods_of_a_pytorchjob_train_together(tmp_path: Path) -> None:
    """With the variables that the operator sets, on one machine."""
    port = free_port("127.0.0.1")
    started = []
    for rank, replica in enumerate(pytorchjob()):
        (container,) = replica["template"]["spec"]["containers"]
        command = [word.replace("/shared", str(tmp_path)) for word in container["command"]]
        env = {one["name"]: one["value"] for one in container["env"]}
        env |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [*programs.PYTHON, "-m", *command, *container["args"][:-1], "1"]
        started.append(subprocess.Popen(words, cwd=ROOT, env={**os.environ, **env}))
    try:
        assert [one.wait(90) for one in started] == [0, 0]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert RunFolder(tmp_path / "runs" / "first").summary.exists()


def test_a_trainjob_runs_torchrun_on_a_runtime_that_is_in_the_same_file() -> None:
    runtime, job = documents("trainjob.yaml")
    assert {one["apiVersion"] for one in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    reference, trainer = job["spec"]["runtimeRef"], job["spec"]["trainer"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"
    assert container["image"] == trainer["image"]
    assert IMAGE.fullmatch(trainer["image"])
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    policy = runtime["spec"]["mlPolicy"]
    assert (policy["numNodes"], policy["torch"]["numProcPerNode"]) == (trainer["numNodes"], trainer["numProcPerNode"])
    assert trainer["command"][:4] == ["torchrun", "-m", "thinwire", "train"]
    config = settings(trainer["command"][4:] + trainer["args"])
    assert config.resume
    assert str(config.out).startswith(mounted(pod)[0])
    assert [one["name"] for one in trainer["env"]] == ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]


def test_the_dockerfile_copies_what_exists_and_what_an_installation_needs() -> None:
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    copied = {Path(source) for line in lines if line[0] == "COPY" for source in line[1:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    readme = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    needed = {
        *(part["path"] for part in readme),
        *project["project"]["license-files"],
        "pyproject.toml",
        "constraints.txt",
    }
    assert {str(path) for path in copied} == {*needed, "src"}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in copied:
        assert (ROOT / path).exists()
        assert str(path) in sent, "left out by .dockerignore"
    (program, *_) = yaml.safe_load(" ".join(next(line for line in lines if line[0] == "CMD")[1:]))
    assert program in project["project"]["scripts"]
    assert all(os.access(ROOT / "examples" / name, os.X_OK) for name in ("slurm/train.sbatch", "two_hosts/train.sh"))


@pytest.mark.parametrize("script", ["examples/slurm/train.sbatch", "examples/two_hosts/train.sh"])
def test_scripts_are_bash_and_give_thinwire_options_that_exist(script: str) -> None:
    text = (ROOT / script).read_text()
    assert subprocess.run(["bash", "-n", str(ROOT / script)], check=False).returncode == 0
    (call,) = re.findall(r"^[^#\n]*thinwire train (.*?)(?: &)?$", text, re.M)
    assert settings([word for word in shlex.split(call) if word != "$@"]).resume
