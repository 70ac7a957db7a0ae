"""Checkpoints come back bit for bit, and what is not one is refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import thinwire as tw
from thinwire.comm.base import Comm
from thinwire.common import tensor_files
from thinwire.common.tensor_files import save_model
from thinwire.errors import RunError
from thinwire.run import states
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.states import pack, unpack

IDENTITY = {"task": "digits", "seed": 0}
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.booleans()
trees = st.recursive(
    leaves,
    lambda t: st.lists(t) | st.lists(t).map(tuple) | st.dictionaries(keys, t),
    max_leaves=20,
)


@given(trees)
def test_any_tree_survives_json(tree: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert unpack(json.loads(json.dumps(pack(tree, tensors))), tensors) == tree


def test_tensors_whose_paths_read_alike_stay_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 0: torch.tensor(3), "0": torch.tensor(4)}
    back = unpack(json.loads(json.dumps(pack(tree, tensors))), tensors)
    assert [back["a/b"], back["a"]["b"], back[0], back["0"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.complex128],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_survive_a_file(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 2).to(dtype)
    state = {"a": [tensor, {0: tensor.t() if tensor.dim() == 2 else tensor}], "b/c": tensor}

    def save_and_load(comm: Comm) -> Any:
        keeper = Checkpoints(tmp_path, comm, IDENTITY, keep=2, warn=print)
        keeper.save(3, lambda: state)
        return keeper.load_latest()

    ((step, loaded),) = tw.simulate(save_and_load, ranks=1)
    assert step == 3
    assert torch.equal(loaded["a"][0], tensor)
    assert loaded["a"][0].dtype == dtype
    assert torch.equal(loaded["a"][1][0], state["a"][1][0])


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(TypeError, match=r"cannot hold object \(at /x/1\)"):
        pack({"x": [1, object()]}, {})


def save_steps(folder: Path, ranks: int, steps: list[int], keep: int = 10) -> None:
    def save(comm: Comm) -> None:
        keeper = Checkpoints(folder, comm, IDENTITY, keep=keep, warn=print)
        for step in steps:
            keeper.save(step, lambda step=step: {"step": step, "rank": comm.rank, "t": torch.full((4,), float(step))})

    tw.simulate(save, ranks=ranks)


def load(folder: Path, ranks: int, identity: dict[str, Any] = IDENTITY) -> tuple[list[Any], list[str]]:
    warnings: list[str] = []
    found = tw.simulate(
        lambda comm: Checkpoints(folder, comm, identity, keep=2, warn=warnings.append).load_latest(), ranks=ranks
    )
    return found, warnings


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, [1, 2, 3, 4, 5], keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_every_rank_gets_its_own_state_of_the_same_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, [10, 20])
    found, warnings = load(tmp_path, 3)
    assert [(step, state["rank"]) for step, state in found] == [(20, 0), (20, 1), (20, 2)]
    assert warnings == []


def damage(path: Path, how: str) -> None:
    data, manifest = path / "rank-1.safetensors", path / "rank-1.json"
    if how == "flipped bit":
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
    elif how == "cut short":
        data.write_bytes(data.read_bytes()[:50])
    elif how == "missing data":
        data.unlink()
    elif how == "missing manifest":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif how == "not a manifest":
        manifest.write_text("[]")
    elif how == "another version":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "thinwire-checkpoint-9"}))


HOWS = [
    "flipped bit",
    "cut short",
    "missing data",
    "missing manifest",
    "half a manifest",
    "not a manifest",
    "another version",
]


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_checkpoint_on_one_rank_sends_all_to_the_one_before(tmp_path: Path, how: str) -> None:
    save_steps(tmp_path, 3, [10, 20])
    damage(tmp_path / "step-00000020", how)
    found, warnings = load(tmp_path, 3)
    assert [(step, state["rank"]) for step, state in found] == [(10, 0), (10, 1), (10, 2)]
    if how != "missing manifest":  # then rank 1 never knew of it
        assert len(warnings) == 1
        assert "step-00000020" in warnings[0]


STATE = {
    "strategy": {"learner": {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"step": 3}}, "groups": [[0]]}}},
    "position": {"epoch": 1, "batch": 2}, "random": (3, (1, 2), None), "losses": [0.5, 1e-3], "name": "é",
}  # fmt: skip


@pytest.fixture
def two_steps(tmp_path: Path) -> Callable[[bytes], tuple[list[Any], list[str]]]:
    """What a rank goes on with when the manifest of its newer checkpoint says something else."""

    def save(comm: Comm) -> None:
        for step in (10, 20):
            Checkpoints(tmp_path, comm, IDENTITY, keep=10, warn=print).save(step, lambda: STATE)

    tw.simulate(save, ranks=1)
    newer = tmp_path / "step-00000020"
    whole = {path.name: path.read_bytes() for path in newer.iterdir()}

    def load_with(manifest: bytes) -> tuple[list[Any], list[str]]:
        for name, content in whole.items():
            (newer / name).write_bytes(content)
        (newer / "rank-0.json").write_bytes(manifest)
        return load(tmp_path, 1)

    load_with.whole = whole["rank-0.json"]  # type: ignore[attr-defined]
    return load_with


def places(value: Any) -> list[list[Any]]:
    """The path to everything in a tree of JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [[], *([key, *rest] for key, one in inside for rest in places(one))]


def test_a_manifest_that_lacks_or_mistakes_anything_sends_to_the_one_before(two_steps: Any) -> None:
    """Once a bare KeyError: 'state', hours after whatever had damaged the file."""
    whole = json.loads(two_steps.whole)
    found = places(whole)[1:]
    assert len(found) >= 40
    for path in found:
        for other in ("drop", None, 0, -1.5, "x", [], {}, True):
            damaged = json.loads(two_steps.whole)
            holder = damaged
            for key in path[:-1]:
                holder = holder[key]
            if other == "drop":
                del holder[path[-1]]
            elif json.dumps(holder[path[-1]]) == json.dumps(other):
                continue
            else:
                holder[path[-1]] = other
            ((step, _),), warnings = two_steps(json.dumps(damaged).encode())
            assert step == 10, (path, other)
            assert "step-00000020" in warnings[0]
    ((step, state),), warnings = two_steps(json.dumps(whole, indent=1).encode())
    assert (step, warnings) == (20, []), "written otherwise, it says the same"
    assert state["strategy"]["learner"]["optimizer"] == {"state": {0: {"step": 3}}, "groups": [[0]]}


@pytest.mark.parametrize(
    "manifest",
    [b"", b"null", b"3", b'"x"', b"[]", b"{}", b'{"format": 3}', b"\xff\xfe", b"[" * 200_000, b'{"a":' * 9999],
)
def test_what_is_no_manifest_sends_to_the_one_before(two_steps: Any, manifest: bytes) -> None:
    assert two_steps(manifest)[0][0][0] == 10


@pytest.mark.slow
def test_a_manifest_that_was_cut_or_changed_anywhere_sends_to_the_one_before(two_steps: Any) -> None:
    whole = two_steps.whole
    for at in range(0, len(whole), 3):
        for damaged in (
            whole[:at],
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
            whole[:at] + whole[at + 1 :],
        ):
            step, state = two_steps(damaged)[0][0]
            assert step == 10 or str(state) == str(STATE), (at, damaged)  # a blank less says the same


@pytest.mark.parametrize("source", ["step-00000010/rank-1", "step-00000020/rank-0"])
def test_a_checkpoint_in_the_place_of_another_is_refused(tmp_path: Path, source: str) -> None:
    save_steps(tmp_path, 2, [10, 20])
    for kind in ("json", "safetensors"):
        shutil.copy(tmp_path / f"{source}.{kind}", tmp_path / f"step-00000020/rank-1.{kind}")
    found, warnings = load(tmp_path, 2)
    assert [step for step, _ in found] == [10, 10]
    assert "is of another step or rank (" in warnings[0]


def test_a_checkpoint_of_an_earlier_format_is_named_and_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, [10])
    manifest = tmp_path / "step-00000010" / "rank-0.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "thinwire-checkpoint-2"}))
    before = {path.name: path.read_bytes() for path in manifest.parent.iterdir()}
    words = "has format 'thinwire-checkpoint-2'; this version of thinwire reads 'thinwire-checkpoint-4'"
    with pytest.raises(tw.RunError, match=f"{words}.*Nothing was changed"):
        load(tmp_path, 1)
    assert {path.name: path.read_bytes() for path in manifest.parent.iterdir()} == before


def test_a_model_of_complex_numbers_is_saved_for_others_to_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.complex64)
    model.wide = torch.nn.Parameter(torch.randn(4, dtype=torch.complex128))
    save_model(model, tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["weight"], model.weight)
    assert torch.equal(torch.view_as_complex(saved["wide"]), model.wide), "of which safetensors has none"


def test_refused_checkpoints_are_set_aside_not_deleted_and_not_kept_for_good_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, [10, 20])
    damage(tmp_path / "step-00000020", "flipped bit")
    load(tmp_path, 2)
    refused = [tmp_path / "step-00000020" / f"rank-1.{kind}.refused" for kind in ("json", "safetensors")]
    before = [path.read_bytes() for path in refused]
    save_steps(tmp_path, 2, [15, 20], keep=2)
    assert [path.read_bytes() for path in refused] == before
    found, _ = load(tmp_path, 2)
    assert [step for step, _ in found] == [20, 20]


def test_the_scraps_of_a_killed_write_are_swept_up(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, [10])
    mine, others = (tmp_path / "step-00000010" / f".rank-{r}.safetensors.123.new" for r in (0, 7))
    mine.touch()
    others.touch()
    load(tmp_path, 2)
    assert not mine.exists()
    assert others.exists()


def test_tensors_without_a_manifest_are_swept_up(tmp_path: Path) -> None:
    """Of a rank that was killed before it wrote the manifest, or after it removed that of an old checkpoint."""
    save_steps(tmp_path, 2, [10, 20, 30])
    for step, rank in ((10, 0), (10, 1), (20, 1)):
        (tmp_path / f"step-{step:08d}" / f"rank-{rank}.json").unlink()
    (tmp_path / "step-00000040").mkdir()
    others = tmp_path / "step-00000010" / "rank-7.safetensors"
    others.touch()
    found, _ = load(tmp_path, 2)
    assert [step for step, _ in found] == [30, 30]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    whole = {
        f"step-{step:08d}/rank-{rank}.{kind}"
        for step, rank in ((20, 0), (30, 0), (30, 1))
        for kind in ("json", "safetensors")
    }
    assert left == {str(others.relative_to(tmp_path)), *whole}
    assert not (tmp_path / "step-00000040").exists()


def test_where_another_run_may_write_nothing_is_swept_up(tmp_path: Path) -> None:
    """It writes the tensors of a checkpoint, the manifest is next."""
    save_steps(tmp_path, 2, [10, 20])
    (tmp_path / "step-00000020" / "rank-1.json").unlink()
    (tmp_path / "step-00000020" / ".rank-1.json.12.new").touch()
    (tmp_path / "step-00000030").mkdir()
    before = {path.name for path in (tmp_path / "step-00000020").iterdir() if "rank-1" in path.name}
    found = tw.simulate(
        lambda comm: Checkpoints(tmp_path, comm, IDENTITY, keep=2, warn=print, sweeps=False).load_latest(), ranks=2
    )
    assert [step for step, _ in found] == [10, 10]
    assert {path.name for path in (tmp_path / "step-00000020").iterdir() if "rank-1" in path.name} == before
    assert (tmp_path / "step-00000030").exists()


def test_checkpoints_of_later_steps_do_not_push_out_new_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, [900, 1000])
    save_steps(tmp_path, 1, [10, 20, 30], keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{s:08d}" for s in (20, 30, 900, 1000)]


def test_what_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, [10])
    bad = {"weight": torch.tensor([1.0, float("nan")])}
    with pytest.raises(RunError, match="weight is not finite after step 20"):
        tw.simulate(lambda comm: Checkpoints(tmp_path, comm, IDENTITY, 2, print).save(20, lambda: bad), ranks=1)
    assert [step for step, _ in load(tmp_path, 1)[0]] == [10]


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, [10])
    with pytest.raises(tw.RunError, match=r"another run \(seed: 0 there, 7 here\).*another --out"):
        load(tmp_path, 1, {**IDENTITY, "seed": 7})
    assert [step for step, _ in load(tmp_path, 1)[0]] == [10], "nothing was changed"


def test_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, [10])
    with pytest.raises(tw.RunError, match="ranks: 2 there, 1 here"):
        load(tmp_path, 1)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert load(tmp_path / "nothing", 2) == ([None, None], [])


def test_a_failed_write_leaves_the_old_checkpoint_and_no_scraps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, [10])

    def full(tensors: Any, path: Path, metadata: Any = None) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(RunError, match=r"cannot write .*No space left on device; free some space"):
        save_steps(tmp_path, 1, [20])
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "step-00000020").iterdir()] == []
    assert [step for step, _ in load(tmp_path, 1)[0]] == [10]


def test_every_random_generator_goes_on_where_it_was() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.randn()]

    random.gauss(0, 1)
    np.random.randn()
    tensors: dict[str, torch.Tensor] = {}
    packed = json.dumps(pack(states.random_state(), tensors))
    first = draw()
    assert draw() != first
    states.set_random_state(unpack(json.loads(packed), tensors))
    assert draw() == first
