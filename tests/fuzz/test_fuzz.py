"""A thousand cases of the fuzzers, the inputs that once broke something, and that a fault in a case is found."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fuzz import codes, data_files
from tests.fuzz.saved import one_rank
from tests.programs import PYTHON, ROOT
from thinwire import registry
from thinwire.codecs import features
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.world import find_world
from thinwire.common.json_text import parse_json
from thinwire.compare.files import read_comparison_file
from thinwire.config import RunConfig, make_config, read_toml
from thinwire.errors import MOST_LETTERS, RunError, ThinwireError, UsageError
from thinwire.run.records import read_rows
from thinwire.run.states import pack, random_state, set_random_state, unpack
from thinwire.spec import parse
from thinwire.tasks.mnist import mnist
from thinwire.tasks.naming import check_task_name


@pytest.mark.usefixtures("program_server")
def test_a_thousand_cases_end_in_a_result_or_a_message() -> None:
    command = [*PYTHON, "-m", "tests.fuzz", "--cases", "1000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    total = ended.stdout.splitlines()[-1].split()
    assert (total[0], total[4:6]) == ("all", ["0", "0"])
    assert 990 <= int(total[1]) == int(total[2]) + int(total[3])


@pytest.mark.usefixtures("program_server")
def test_what_no_case_may_do_is_found() -> None:
    ended = subprocess.run([*PYTHON, "-m", "tests.fuzz.broken"], cwd=ROOT, capture_output=True, text=True, timeout=110)
    found = json.loads(ended.stdout)
    assert found.pop("nothing") == [2, 0, 0]
    crashes = {
        name for name, (accepted, crashed, executed) in found.items() if (accepted, crashed, executed) == (0, 2, 0)
    }
    assert crashes == {"raises", "lines", "memory", "time", "crash", "exits"}
    executed = {name for name, counts in found.items() if counts == [0, 0, 2]}
    assert executed == found.keys() - crashes


# ---- inputs that once broke something


@pytest.mark.parametrize("text", ["f(x=0x" + "f" * 5000 + ")", "f(x=1, x=2)", "f(1e999)", "f(-1e999)", "f(x=\0)"])
def test_specs(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_messages_are_one_line_of_text() -> None:
    with pytest.raises(UsageError) as caught:
        parse("a\n\x1b[31m\u202e" + "x" * 10_000)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= MOST_LETTERS
    assert str(RunError("several\nlines\x1b")) == "several\nlines\\x1b"


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "9"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "x"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "x"},
        {"RANK": "0", "WORLD_SIZE": "9" * 5000},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "5"},
    ],
)
def test_worlds(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="environment"):
        find_world(env)


def test_a_list_of_tasks_is_not_made_long() -> None:
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}
    world = find_world({**env, "SLURM_STEP_NODELIST": "a[1-2]"})
    assert world is not None
    assert world.local_size == 1


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "epochs = " + "9" * 5000])
def test_settings(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"x\.toml"):
        read_toml(path)


@pytest.mark.parametrize("settings", [{"out": "a\ud800"}, {"task": "digits\x7f"}])
def test_settings_that_cannot_be_saved(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no text"):
        make_config(settings)
    assert RunConfig(out=Path("é x")).out == Path("é x")


def test_long_names() -> None:
    with pytest.raises(UsageError, match="unknown task"):
        check_task_name("x" * 5000)


def test_states_with_any_keys() -> None:
    state = {("a", 1): {2: "x"}, "$tensor": None}
    assert unpack(json.loads(json.dumps(pack(state, {}))), {}) == state


def test_random_states_beyond_their_numbers() -> None:
    state = random_state()
    name, keys, _position, *rest = state["numpy"]
    with pytest.raises(RunError, match="damaged"):
        set_random_state({**state, "numpy": (name, keys, 10**6, *rest)})
    set_random_state(state)
    assert np.random.rand() >= 0


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "9" * 30 + "]", b"\xff", ""])
def test_json(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"specs": ["../../x"]},
        {"specs": ["a" * 300]},
        {"seeds": ["../x"]},
        {"seeds": [-1]},
        {"errors": []},
        {"target": "x"},
    ],
)
def test_comparisons(change: dict[str, Any], tmp_path: Path) -> None:
    about = {"format": 1, "specs": ["ab"], "seeds": [0], "errors": {}, "target": None, "command": "x"}
    (tmp_path / "compare.json").write_text(json.dumps(about))
    assert read_comparison_file(tmp_path) == about
    (tmp_path / "compare.json").write_text(json.dumps(about | change))
    with pytest.raises(UsageError, match=r"compare\.json"):
        read_comparison_file(tmp_path)


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\xff\n{"step": 2', encoding="latin-1")
    assert read_rows(path) == [{"step": 1}]
    for line in ("[3]", '{"step": 2, "test_accuracy": 90}', '{"step": 2, "seconds": 1e308}'):
        path.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(UsageError, match=r"line 2 of .*metrics\.jsonl"):
            read_rows(path)


@pytest.mark.parametrize(
    "images", [gzip.compress(bytes(100))[:-20], gzip.compress(bytes(2**27)), data_files.idx((1, 28, 29), bytes(812))]
)
def test_data(images: bytes, tmp_path: Path) -> None:
    ending = ".gz" if images[:2] == b"\x1f\x8b" else ""
    (tmp_path / f"train-images-idx3-ubyte{ending}").write_bytes(images)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(data_files.idx((1,), b"\0"))
    with pytest.raises(UsageError, match="MNIST"):
        mnist(tmp_path, 0)


def test_indices_of_other_ranks_stay_inside() -> None:
    comm = codes.HostileComm(one_rank())
    comm._any = lambda like: torch.full_like(like, 2**31 - 1)  # type: ignore[method-assign]
    reducer = registry.build("reducers", "topk(ratio=0.5)")
    tensors = {"x": torch.ones(8)}
    assert reducer.reduce(tensors, reducer.init(tensors), comm).mean["x"].shape == (8,)


def test_activations_without_dimensions() -> None:
    z = torch.tensor(2.0)
    assert features.unpack(features.pack(z, "int8"), (), torch.float32, "int8").shape == ()


@pytest.mark.parametrize(("heard", "length"), [(b"[", 1024), (b"\xff", 1024), (b"1", 2**40), (b"1", 0)])
def test_messages(heard: bytes, length: int) -> None:
    comm = codes.Messages(one_rank())
    comm.size, comm.nodes, comm.heard, comm.length = 2, (0, 0), heard, length
    with pytest.raises(ThinwireError, match="rank"):
        all_gather_json(comm, 1)
