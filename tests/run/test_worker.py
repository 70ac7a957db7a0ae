"""One run as its ranks see it: records, evaluation, exact resume."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import random
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import thinwire as tw
from tests import user_task
from tests.worlds import ProcessWorlds
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.config import RunConfig
from thinwire.errors import RunError, UsageError
from thinwire.launch.settings import resolve
from thinwire.run import recorder
from thinwire.run.checkpoint import _hash_json
from thinwire.run.evaluation import evaluate
from thinwire.run.records import RunFolder, read_rows
from thinwire.run.startup import open_folder, with_defaults
from thinwire.run.worker import Run
from thinwire.strategies.ab_phases import PhaseLengths
from thinwire.tasks.loading import load_task

pytestmark = pytest.mark.slow  # each test trains with the command's defaults
SUMMARY_KEYS = {
    "task", "strategy", "ranks", "nodes", "link", "seed", "epochs", "steps", "seconds", "train_seconds", "metric",
    "value", "best", "wire_bytes_per_rank", "wire_bytes_by_link", "kernel_bytes_per_rank", "parameters",
    "parameters_consolidated", "peak_memory_bytes", "versions",
}  # fmt: skip


def train(comm: Comm, settings: dict[str, Any]) -> dict[str, Any]:
    comm.ledger.load_rows([])
    return Run(RunConfig(**settings), comm, torch.device("cpu")).run()


def alone(**settings: Any) -> dict[str, Any]:
    with tw.join() as comm:
        return train(comm, settings)


def same_files(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def timeless(folder: Path, name: str) -> list[dict[str, Any]]:
    """Rows without what depends on the clock."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in read_rows(folder / name)]


def test_a_run_leaves_its_records(tmp_path: Path) -> None:
    summary = alone(out=tmp_path / "run", epochs=3, strategy="data_parallel(reducer=bf16)")
    assert summary.keys() >= SUMMARY_KEYS
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[-1]["test_accuracy"] == summary["value"]
    assert summary["best"] == max(row["test_accuracy"] for row in rows)
    assert summary["steps"] == rows[-1]["step"] == 3 * 90
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    ledger = read_rows(tmp_path / "run" / "ledger.jsonl")
    assert {row["purpose"] for row in ledger} == {"train", "start", "eval", "checkpoint"}
    assert sum(row["wire_bytes"] for row in ledger) == 0


def test_one_rank_exchanges_no_exact_gradients(tmp_path: Path) -> None:
    alone(out=tmp_path / "run", epochs=1)
    purposes = {row["purpose"] for row in read_rows(tmp_path / "run" / "ledger.jsonl")}
    assert purposes == {"start", "eval", "checkpoint"}


TESTED_SELDOM = [
    "data_parallel(reducer=maxnorm(bits=4))",
    "local_sgd(every=5)",
    "daso(ranks_per_node=2, warmup_epochs=1, cooldown_epochs=1)",
    "ab(group_size=2, sync_every=9, warmup=3, rebound=2, cutoff=0.5)",
    "ist(local_steps=7)",
    "local_parallel(blocks=2)",
]


def train_with_fewer_tests(comm: Comm, strategy: str, folder: str) -> None:
    for every in (1, 2, 0):
        settings = {"task": "tests.user_task:noisy", "model": "mlp(width=24, depth=3, norm=True)", "strategy": strategy}
        train(comm, {**settings, "epochs": 3, "test_every": every, "out": f"{folder}/{every}"})


def without_tests(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics without times, tests, and the bytes of evaluation."""
    rows = timeless(folder, "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("test_") and k != "wire_bytes"} for row in rows]


@pytest.mark.parametrize("strategy", TESTED_SELDOM)
def test_weights_losses_and_training_bytes_do_not_depend_on_tests(
    process_world: ProcessWorlds, tmp_path: Path, strategy: str
) -> None:
    process_world.run(train_with_fewer_tests, 4, strategy, str(tmp_path))
    always, second, last = (tmp_path / name for name in ("1", "2", "0"))
    values = [[row.get("test_accuracy") for row in read_rows(run / "metrics.jsonl")] for run in (always, second, last)]
    assert values[1:] == [[None, values[0][1], values[0][2]], [None, None, values[0][2]]]
    for run in (second, last):
        assert same_files(always, run)
        assert without_tests(always) == without_tests(run)
        whole, own = (json.loads((folder / "summary.json").read_text()) for folder in (always, run))
        assert own["value"] == whole["value"]
        for purpose in ("train", "sync"):
            assert own["wire_bytes_by_purpose"].get(purpose) == whole["wire_bytes_by_purpose"].get(purpose)


def test_the_best_metric_is_that_of_the_epochs_that_were_tested(tmp_path: Path) -> None:
    for every in (0, 2):
        summary = alone(out=tmp_path / str(every), epochs=3, test_every=every, lr=0.3)
        rows = read_rows(tmp_path / str(every) / "metrics.jsonl")
        tested = [row["test_accuracy"] for row in rows if "test_accuracy" in row]
        assert (len(tested), summary["best"], summary["value"]) == (1 + every // 2, max(tested), tested[-1])


def test_progress_shows_the_metric_of_epochs_that_were_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone(out=tmp_path / "run", epochs=2, test_every=2)
    first, second = (line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch"))
    assert "accuracy" not in first
    assert "accuracy" in second
    with tw.join() as comm:
        progress = tmp_path / "progress.json"
        config = RunConfig(out=tmp_path / "quiet", epochs=2, test_every=0)
        Run(config, comm, torch.device("cpu"), progress_file=progress).run()
        assert json.loads(progress.read_text())["value"] is None


def test_a_run_that_is_stopped_early_is_tested_at_the_stop_and_goes_on_exactly(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"task": "tests.user_task:noisy", "epochs": 3, "test_every": 0}
    alone(**settings, out=tmp_path / "whole")
    stopped = alone(**settings, out=tmp_path / "cut", minutes=1e-9)
    rows = read_rows(tmp_path / "cut" / "metrics.jsonl")
    assert (stopped["epochs"], stopped["value"]) == (1, rows[-1]["test_accuracy"])
    resumed = alone(**settings, out=tmp_path / "cut", resume=True)
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (resumed["value"], resumed["epochs"]) == (whole["value"], 3)
    assert resumed["wire_bytes_by_purpose"] == whole["wire_bytes_by_purpose"]
    again = alone(**settings, out=tmp_path / "cut", resume=True)  # nothing is left to train
    assert again["value"] == whole["value"]


def test_the_model_file_needs_no_thinwire(tmp_path: Path) -> None:
    summary = alone(out=tmp_path / "run", epochs=2)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    inputs, labels = load_task("digits", None, 0).test.tensors
    accuracy = (model(inputs).argmax(1) == labels).float().mean().item() * 100
    assert accuracy == pytest.approx(summary["value"], abs=1e-4)


def evaluation(comm: Comm) -> dict[str, float]:
    task = load_task("digits", None, 0)
    torch.manual_seed(0)
    return evaluate(task.build_model(), task, comm, torch.device("cpu"), batch_size=7)


def test_evaluation_covers_the_whole_test_set_on_any_number_of_ranks(process_world: ProcessWorlds) -> None:
    task = load_task("digits", None, 0)
    torch.manual_seed(0)
    model = task.build_model().eval()
    inputs, labels = task.test.tensors
    with torch.no_grad():
        outputs = model(inputs)
    for ranks in (1, 3, 4):
        for result in process_world.run(evaluation, ranks):
            assert result["accuracy"] == pytest.approx((outputs.argmax(1) == labels).double().mean().item() * 100)
            assert result["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)


def tiny(comm: Comm) -> dict[str, float]:
    """Three test samples of a dataset that is not a TensorDataset, on four ranks."""
    task = load_task("digits", None, 0)
    task = dataclasses.replace(task, test=torch.utils.data.Subset(task.test, [0, 1, 2]))
    torch.manual_seed(0)
    return evaluate(task.build_model(), task, comm, torch.device("cpu"), batch_size=2)


def test_a_rank_without_test_samples_does_no_harm(process_world: ProcessWorlds) -> None:
    results = process_world.run(tiny, 4) + process_world.run(tiny, 1)
    assert all(result["accuracy"] == results[0]["accuracy"] for result in results)
    assert all(result["loss"] == pytest.approx(results[0]["loss"]) for result in results)


def test_wrong_defaults_of_a_task_are_named(tmp_path: Path) -> None:
    for defaults, message in (({"epoch": 3}, "did you mean 'epochs'"), ({"lr": -1}, "lr=-1 is not possible")):
        task = dataclasses.replace(load_task("digits", None, 0), defaults=defaults)
        with tw.join() as comm, pytest.raises(tw.UsageError, match=message):
            with_defaults(RunConfig(), task, comm.size)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    task = "tests.user_task:noisy"
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        alone(task=task, out=tmp_path / name, epochs=1, seed=seed)
    assert same_files(tmp_path / "a", tmp_path / "b")
    assert timeless(tmp_path / "a", "metrics.jsonl") == timeless(tmp_path / "b", "metrics.jsonl")
    assert not same_files(tmp_path / "a", tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("step", "every"), [(3, 2), (46, 0), (60, 7), (89, 44)])
def test_resume_is_exact_alone(tmp_path: Path, step: int, every: int, optimizer: str) -> None:
    """45 steps an epoch; with `every` 0 only the ends of epochs are kept."""
    settings: dict[str, Any] = {"epochs": 2, "checkpoint_every": every, "optimizer": optimizer, "lr": 0.01}
    alone(task="tests.user_task:noisy", out=tmp_path / "whole", **settings)
    marker = tmp_path / "happened"
    task = f"tests.user_task:noisy(fault='raise', step={step}, once={str(marker)!r})"
    with pytest.raises(ZeroDivisionError):
        alone(task=task, out=tmp_path / "cut", **settings)
    summary = alone(task=task, out=tmp_path / "cut", resume=True, **settings)
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    for file in ("metrics.jsonl", "ledger.jsonl"):
        assert timeless(tmp_path / "whole", file) == timeless(tmp_path / "cut", file)
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert whole["wire_bytes_per_rank"] == summary["wire_bytes_per_rank"]
    assert whole["best"] == summary["best"]


def test_ranks_of_which_some_find_no_run_are_told_so(tmp_path: Path) -> None:
    """On machines without a common disk, one of which is new."""
    RunFolder(tmp_path).save_config(RunConfig(out=tmp_path))

    def open_it(comm: Comm) -> str:
        with pytest.raises(UsageError, match=r"ranks \[1, 2\] find no run in .*give another --out") as caught:
            open_folder(RunConfig(out=tmp_path, resume=comm.rank == 0), comm)
        return str(caught.value)

    assert len(set(tw.simulate(open_it, ranks=3))) == 1


@pytest.mark.parametrize("locks", [True, False])
def test_tensors_of_another_run_are_swept_up_only_where_there_are_locks(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    folder, settings = tmp_path / "run", {"task": "synthetic(samples=64, width=8)", "out": tmp_path / "run"}
    alone(**settings, epochs=1)
    tensors = folder / "checkpoints" / "step-00000009" / "rank-0.safetensors"
    tensors.parent.mkdir()
    tensors.touch()
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)

    def opened(comm: Comm) -> bool:
        run = Run(RunConfig(**settings, epochs=2, resume=True), comm, torch.device("cpu"))
        run._resume()
        run.folder.release()
        return run.folder.is_held

    with tw.join() as comm:
        assert opened(comm) is locks
    assert tensors.exists() is not locks


def test_every_rank_knows_whether_the_folder_is_held(tmp_path: Path) -> None:
    def opened(comm: Comm) -> bool:
        folder = open_folder(RunConfig(out=tmp_path), comm)
        folder.release()
        return folder.is_held

    assert tw.simulate(opened, ranks=3) == [True] * 3


def resume_on(comm: Comm, settings: dict[str, Any], folder: str) -> None:
    """A straight run of two epochs, and one of one epoch that is then extended."""
    settings = {"task": "tests.user_task:noisy", "schedule": "constant", "checkpoint_every": 4, **settings}
    train(comm, {**settings, "epochs": 2, "out": f"{folder}/whole"})
    train(comm, {**settings, "epochs": 1, "out": f"{folder}/cut"})
    train(comm, {**settings, "epochs": 2, "out": f"{folder}/cut", "resume": True})


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_resume_is_exact_with_ranks(process_world: ProcessWorlds, tmp_path: Path, ranks: int) -> None:
    process_world.run(resume_on, ranks, {}, str(tmp_path))
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    for file in ("metrics.jsonl", "ledger.jsonl"):
        assert timeless(tmp_path / "whole", file) == timeless(tmp_path / "cut", file)


def stop_in_flight(comm: Comm, strategy: str, folder: str) -> None:
    """A whole run; and what would have been left had it been stopped within its second epoch, gone on with."""
    settings = {
        "task": "tests.user_task:noisy",
        "strategy": strategy,
        "epochs": 3,
        "checkpoint_every": STOPPED_AT,
        "keep": 9,
    }
    train(comm, {**settings, "out": f"{folder}/whole"})
    go_on_from(comm, STOPPED_AT, settings, folder, "cut")


def go_on_from(comm: Comm, step: int, settings: dict[str, Any], folder: str, name: str) -> None:
    """Finish what a whole run would have left had it been stopped after a step."""
    if comm.rank == 0:
        shutil.copytree(f"{folder}/whole", f"{folder}/{name}")
        for checkpoint in Path(folder, name, "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step-")) > step:
                shutil.rmtree(checkpoint)
        for result in Path(folder, name).glob("*.safetensors"):
            result.unlink()
        Path(folder, name, "summary.json").unlink()
    comm.barrier()
    train(comm, {**settings, "out": f"{folder}/{name}", "resume": True})


STOPPED_AT = 17  # of 12 batches an epoch: after batch 4 of the second, when both have something under way


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco(every=8, fragments=4)",
        "daso(ranks_per_node=2, warmup_epochs=0, cooldown_epochs=1, max_global_skips=8)",
    ],
)
def test_a_run_stopped_while_an_exchange_is_under_way_goes_on_exactly(
    process_world: ProcessWorlds, tmp_path: Path, strategy: str
) -> None:
    process_world.run(stop_in_flight, 4, strategy, str(tmp_path))
    states = list((tmp_path / "whole" / "checkpoints").glob(f"*{STOPPED_AT:02d}/rank-*.json"))
    assert len(states) == 4
    assert all(json.loads(s.read_text())["tree"]["strategy"]["averaging"]["in_flight"] is not None for s in states)
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    for file in ("metrics.jsonl", "ledger.jsonl"):
        assert timeless(tmp_path / "whole", file) == timeless(tmp_path / "cut", file)


FACTORED = {
    "task": "tests.user_task:noisy",
    "model": "mlp(width=24, depth=3, norm=True)",
    "strategy": "ab(sync_every=6, warmup=4, rebound=2, cutoff=0.6, moments=slice)",
    "optimizer": "adamw",
    "lr": 0.01,
    "epochs": 2,
    "checkpoint_every": 1,
    "keep": 99,
}
STOPS = {4: "warmup", 5: "ab", 7: "rebound", 8: "rebound", 17: "joint"}  # the next step may be of another phase


def stop_in_every_phase(comm: Comm, folder: str) -> dict[str, Any]:
    summary = train(comm, {**FACTORED, "out": f"{folder}/whole"})
    for step in STOPS:
        go_on_from(comm, step, FACTORED, folder, f"cut-{step}")
    return summary


def test_a_run_with_factors_goes_on_exactly_from_any_phase(process_world: ProcessWorlds, tmp_path: Path) -> None:
    summary = process_world.run(stop_in_every_phase, 4, str(tmp_path))[0]
    for step, phase in STOPS.items():
        states = list((tmp_path / "whole" / "checkpoints").glob(f"step-{step:08d}/rank-*.json"))
        assert [json.loads(s.read_text())["tree"]["strategy"]["phase"] for s in states] == [phase] * 4
        cut = tmp_path / f"cut-{step}"
        assert same_files(tmp_path / "whole", cut)
        assert (cut / "model-factored.safetensors").read_bytes() == (
            tmp_path / "whole" / "model-factored.safetensors"
        ).read_bytes()
        for file in ("metrics.jsonl", "ledger.jsonl"):
            assert timeless(tmp_path / "whole", file) == timeless(cut, file)
    check_factored(tmp_path / "whole", summary)


def test_phases_scale_to_a_run_of_the_command(tmp_path: Path) -> None:
    alone(out=tmp_path, strategy="ab(cutoff=0.4)", epochs=4, model="mlp(width=64, depth=3)")
    rows = read_rows(tmp_path / "metrics.jsonl")
    phases = PhaseLengths().phases(epochs=4, epoch_steps=rows[0]["step"])
    assert [row["phase"] for row in rows] == [phases.at(row["step"] - 1) for row in rows]
    assert "ab" in {row["phase"] for row in rows}
    manifest = next((tmp_path / "checkpoints").glob(f"step-*{rows[-1]['step']}/rank-0.json"))
    assert json.loads(manifest.read_text())["tree"]["strategy"]["phases"] == asdict(phases)


def check_factored(folder: Path, summary: dict[str, Any]) -> None:
    """Sizes, ratio and metric are those of the two files, and the factors' products are the weights."""
    whole, small = load_file(folder / "model.safetensors"), load_file(folder / "model-factored.safetensors")
    parameters = [
        sum(t.numel() for n, t in tensors.items() if "running" not in n and "num_" not in n)
        for tensors in (whole, small)
    ]
    (about,) = summary["artifacts"]
    assert about["file"] == "model-factored.safetensors"
    assert [summary["parameters"], about["parameters"]] == parameters
    assert summary["parameters_consolidated"] == about["parameters"]
    assert about["ratio"] == pytest.approx(parameters[0] / parameters[1])
    assert [summary["model_bytes"], about["bytes"]] == [
        sum(t.nbytes for t in tensors.values()) for tensors in (whole, small)
    ]
    assert about["value"] == pytest.approx(summary["value"], abs=0.5)
    names = {name.removesuffix(".down.weight") for name in small if name.endswith(".down.weight")}
    assert names
    for name in names:
        product = small[f"{name}.up.weight"] @ small[f"{name}.down.weight"]
        torch.testing.assert_close(product, whole[f"{name}.weight"], rtol=1e-5, atol=1e-6)
    row = read_rows(folder / "metrics.jsonl")[-1]
    assert row["phase"] == "joint"
    assert {name for name, (rank, largest) in row["layer_ranks"].items() if rank < largest} == names


IN_BLOCKS = {
    "model": "mlp(width=32, depth=3, norm=True)", "optimizer": "adamw", "lr": 0.01, "epochs": 2, "checkpoint_every": 1,
    "keep": 1000,
}  # fmt: skip
CUT = {"local": "local_parallel(blocks=2, head=readout(every=4), window=2)", "pipeline": "pipeline(blocks=2)"}


def blocks_cut_short(comm: Comm, name: str, folder: str) -> dict[str, Any]:
    config = {**IN_BLOCKS, "strategy": CUT[name]}
    summary = train(comm, {**config, "out": Path(folder, "whole")})
    go_on_from(comm, 27, config, folder, "cut")
    return summary


@pytest.mark.parametrize("name", CUT)
def test_a_run_in_blocks_goes_on_exactly_and_tells_of_its_exits(
    process_world: ProcessWorlds, tmp_path: Path, name: str
) -> None:
    summary = process_world.run(blocks_cut_short, 4, name, str(tmp_path))[0]
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    if name == "local":  # torch's stages vote anew, in 4 bytes
        assert timeless(tmp_path / "whole", "metrics.jsonl") == timeless(tmp_path / "cut", "metrics.jsonl")
        ledgers = [timeless(tmp_path / run, "ledger.jsonl") for run in ("whole", "cut")]
        one, other = ([row for row in ledger if row["op"] != "recv"] for ledger in ledgers)  # those ahead of need twice
        assert one == other
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert rows[1]["train_loss"] < rows[0]["train_loss"] < 2.4
    operations, backprop = summary["status"]["operations"]
    assert backprop == 2 * (2 * 64 * 32 + 3 * (2 * 32 * 32 + 32 * 10))
    exits = sorted((tmp_path / "whole").glob("exit-*.safetensors"))
    assert len(exits) == len(summary["artifacts"]) == (1 if name == "local" else 0)
    if name == "local":
        assert operations > backprop
        tensors = load_file(exits[0])
        counted = sum(t.numel() for n, t in tensors.items() if "running" not in n and "num_" not in n)
        assert summary["artifacts"][0]["parameters"] == counted
        assert summary["artifacts"][0]["value"] > 50
        assert exits[0].read_bytes() == (tmp_path / "cut" / exits[0].name).read_bytes()


NARROW = {
    "strategy": "ist(local_steps=7)", "model": "mlp(width=32, norm=True)", "optimizer": "adamw", "lr": 0.01,
    "epochs": 2, "checkpoint_every": 1, "keep": 1000,
}  # fmt: skip


def narrow_networks(comm: Comm, folder: str) -> None:
    """A run, the same stopped in mid-round and gone on, and the same where no rank has room for the whole network."""
    train(comm, {**NARROW, "out": Path(folder, "whole")})
    go_on_from(comm, 26, NARROW, folder, "cut")
    for _ in range(2):  # the second goes on with the first
        sharded = {**NARROW, "strategy": "ist(local_steps=7, whole_gb=1e-6)", "out": Path(folder, "sharded")}
        train(comm, {**sharded, "resume": Path(folder, "sharded", "config.toml").exists()})


def test_narrow_networks_go_on_exactly_and_are_tested_and_written_in_parts(
    process_world: ProcessWorlds, tmp_path: Path
) -> None:
    process_world.run(narrow_networks, 3, str(tmp_path))
    whole, cut, sharded = (tmp_path / name for name in ("whole", "cut", "sharded"))
    assert same_files(whole, cut)
    for file in ("metrics.jsonl", "ledger.jsonl"):
        assert timeless(whole, file) == timeless(cut, file)
    assert not (sharded / "model.safetensors").exists()
    index = json.loads((sharded / "model" / "model.safetensors.index.json").read_text())
    found = {n: t for file in (sharded / "model").glob("*.safetensors") for n, t in load_file(file).items()}
    expected = load_file(whole / "model.safetensors")
    assert index["weight_map"].keys() == found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    for one, other in zip(read_rows(whole / "metrics.jsonl"), read_rows(sharded / "metrics.jsonl"), strict=True):
        assert one["test_accuracy"] == pytest.approx(other["test_accuracy"], abs=0.3)
        assert one["train_loss"] == other["train_loss"]
        assert one["round"] == (one["step"] - 1) // 7


def rewrite(manifest: Path, text: dict[str, Any]) -> None:
    """A manifest that says something else, whole again."""
    told = {key: text[key] for key in text if key not in ("format", "manifest_sha256")}
    manifest.write_text(json.dumps({**text, "manifest_sha256": _hash_json(told)}))


def without_residual(comm: Comm, folder: str) -> str:
    """Take one residual out of the newest checkpoint of a run, and make its manifest fit again."""
    for manifest in Path(folder).glob(f"checkpoints/*/rank-{comm.rank}.json"):
        text = json.loads(manifest.read_text())
        state = text["tree"]["strategy"]["reducer"][0]
        del state[next(name for name in state if name.startswith("residual/"))]
        rewrite(manifest, text)
    settings = {"task": "tests.user_task:noisy", "schedule": "constant", "checkpoint_every": 4, "strategy": FEEDBACK}
    with pytest.raises(RunError) as caught:
        train(comm, {**settings, "epochs": 3, "out": folder, "resume": True})
    return str(caught.value)


FEEDBACK = "data_parallel(reducer=error_feedback(maxnorm(bits=2)))"


def test_resume_with_feedback_is_exact_and_refused_without_its_residual(
    process_world: ProcessWorlds, tmp_path: Path
) -> None:
    process_world.run(resume_on, 3, {"strategy": FEEDBACK}, str(tmp_path))
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    for file in ("metrics.jsonl", "ledger.jsonl"):
        assert timeless(tmp_path / "whole", file) == timeless(tmp_path / "cut", file)
    for message in process_world.run(without_residual, 3, str(tmp_path / "cut")):
        assert "the saved state of the reducer does not fit (it lacks residual/" in message


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the loss is nan at step 33; try a lower --lr"):
        alone(task="tests.user_task:noisy(fault='nan', step=33)", out=tmp_path / "run", checkpoint_every=10)
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000020", "step-00000030"], "nothing that came after the fault is kept"


def test_a_run_that_failed_before_its_first_checkpoint_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the loss is nan"):
        alone(lr=1e30, out=tmp_path / "run", epochs=1)
    with pytest.raises(tw.UsageError, match="gpt takes sequences"):
        alone(model="gpt", out=tmp_path / "run", epochs=1)
    with pytest.raises(ZeroDivisionError):
        alone(task="tests.user_task:noisy(fault='raise', step=3)", out=tmp_path / "run", epochs=1)
    assert not (tmp_path / "run").exists()
    alone(out=tmp_path / "run", epochs=1)


def test_what_is_left_of_a_run_is_not_written_over(tmp_path: Path) -> None:
    alone(out=tmp_path / "run", epochs=1)
    (tmp_path / "run" / "config.toml").unlink()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(tw.UsageError, match=r"holds metrics.jsonl of a run without config.toml; give another --out"):
        alone(out=tmp_path / "run", epochs=1)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_fewer_epochs_than_are_done_is_refused(tmp_path: Path) -> None:
    alone(out=tmp_path / "run", epochs=2)
    before = (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(tw.UsageError, match="--epochs 1, but 2 epochs and 0 steps are done already"):
        alone(out=tmp_path / "run", epochs=1, resume=True)
    assert (tmp_path / "run" / "config.toml").read_text() == before


def test_the_config_of_a_resumed_run_repeats_it(tmp_path: Path) -> None:
    alone(out=tmp_path / "run", epochs=1, schedule="constant")
    alone(out=tmp_path / "run", epochs=2, schedule="constant", resume=True)
    config = resolve(tmp_path / "run" / "config.toml", {"out": tmp_path / "again"})
    assert config.model == "mlp"
    alone(**config.model_dump())
    assert same_files(tmp_path / "run", tmp_path / "again")


def crash_at_the_end_of_an_epoch(comm: Comm, folder: str) -> None:
    """12 steps an epoch, a checkpoint every 4, and the process dies when rank 1 is about to write the last one."""
    settings = {"task": "tests.user_task:noisy", "checkpoint_every": 4, "out": folder, "epochs": 2}
    run = Run(RunConfig(**settings), comm, torch.device("cpu"))
    save = run.checkpoints.save

    def dying(step: int, make_state: Any) -> None:
        last = step == 12 and run.at.batch == 0  # the save after the evaluation
        if last and comm.rank == 1:
            comm.barrier()
            raise ZeroDivisionError
        save(step, make_state)
        if last:
            raise ZeroDivisionError

    run.checkpoints.save = dying  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run.run()
    train(comm, {**settings, "resume": True})


def test_a_crash_between_the_ranks_writes_does_not_spoil_the_run(process_world: ProcessWorlds, tmp_path: Path) -> None:
    process_world.run(crash_at_the_end_of_an_epoch, 4, str(tmp_path / "cut"))
    settings = {"task": "tests.user_task:noisy", "checkpoint_every": 4, "epochs": 2}
    process_world.run(train, 4, {**settings, "out": str(tmp_path / "whole")})
    assert same_files(tmp_path / "whole", tmp_path / "cut")


def randomness(comm: Comm, folder: str) -> Any:
    run = Run(RunConfig(task="tests.user_task:noisy", out=f"{folder}/{comm.rank}"), comm, torch.device("cpu"))
    batch = torch.zeros(2, 1, 8, 8), torch.zeros(2)
    noise = [run._transformed(batch)[0]]
    run._advance(batch=1)
    noise.append(run._transformed(batch)[0])
    run._advance(batch=0, epoch=1)
    noise.append(run._transformed(batch)[0])
    return torch.rand(1).item(), random.random(), [n.sum().item() for n in noise]


def test_ranks_steps_and_epochs_draw_different_numbers(process_world: ProcessWorlds, tmp_path: Path) -> None:
    results = process_world.run(randomness, 3, str(tmp_path))
    assert len({r[0] for r in results}) == 3, "dropout"
    assert len({r[1] for r in results}) == 3
    assert len({n for r in results for n in r[2]}) == 9, "augmentation"
    again = process_world.run(randomness, 3, str(tmp_path / "again"))
    assert again == results


@pytest.mark.parametrize("setting", [{"clip_norm": 1e-6}, {"accumulate": 4}, {"autocast": True}, {"lr": 0.01}])
def test_settings_reach_the_training(tmp_path: Path, setting: dict[str, Any]) -> None:
    alone(task="tests.user_task:noisy", epochs=1, out=tmp_path / "plain")
    alone(task="tests.user_task:noisy", epochs=1, out=tmp_path / "set", **setting)
    assert not same_files(tmp_path / "plain", tmp_path / "set")


def test_pieces_of_the_last_small_batch_are_not_too_small(tmp_path: Path) -> None:
    alone(
        task="synthetic(samples=39)", model="mlp(norm=True)", batch_size=32, accumulate=8, epochs=1, out=tmp_path / "x"
    )


def mean_loss(comm: Comm, folder: str) -> tuple[float, float]:
    run = Run(RunConfig(out=f"{folder}/run", epochs=1), comm, torch.device("cpu"))
    seen: list[float] = []
    step = run.strategy.step

    def listening(batch: Any) -> torch.Tensor:
        loss = step(batch)
        seen.append(loss.item())
        return loss

    run.strategy.step = listening  # type: ignore[method-assign]
    run.run()
    return sum(seen) / len(seen), read_rows(run.folder.metrics)[0]["train_loss"]


def test_the_training_loss_is_the_mean_over_ranks(process_world: ProcessWorlds, tmp_path: Path) -> None:
    results = process_world.run(mean_loss, 3, str(tmp_path))
    own, recorded = zip(*results, strict=True)
    assert len(set(own)) == 3
    assert recorded == pytest.approx([sum(own) / 3] * 3)


def test_time_goes_on_after_a_resume(tmp_path: Path) -> None:
    first = alone(out=tmp_path / "run", epochs=1, schedule="constant")
    second = alone(out=tmp_path / "run", epochs=2, schedule="constant", resume=True)
    assert second["seconds"] > first["seconds"]
    assert second["train_seconds"] > first["train_seconds"]


def test_other_data_or_another_model_of_the_same_name_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    alone(task="tests.user_task:changing", out=tmp_path / "run", epochs=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for change, message in (("SAMPLES", "samples: 1000 there, 900 here"), ("WIDTH", "weights: ")):
        user_task.CHANGING[change] -= 100
        with pytest.raises(RunError, match=f"{message}.*Nothing was changed.*another --out"):
            alone(task="tests.user_task:changing", out=tmp_path / "run", epochs=1, resume=True)
        user_task.CHANGING[change] += 100
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_samples_per_second_counts_samples(tmp_path: Path) -> None:
    alone(out=tmp_path / "run", epochs=1, batch_size=10**6)
    row = read_rows(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["samples_per_second"] * row["train_seconds"] == pytest.approx(1437, rel=0.5)


def work_done(comm: Comm, specs: list[str], settings: dict[str, Any], folder: str) -> list[tuple[int, int]]:
    """Updates and samples of a run with each strategy."""
    done = []
    for i, spec in enumerate(specs):
        run = Run(RunConfig(**settings, strategy=spec, out=Path(folder, str(i))), comm, torch.device("cpu"))
        run.run()
        done.append((run.at.step, run.at.samples))
    return done


def test_the_best_test_of_a_run_that_goes_on_counts_its_old_end(tmp_path: Path) -> None:
    """Tested only when training ends: after one epoch and, resumed with one more, after two."""
    out = tmp_path / "run"
    first = alone(out=out, epochs=1, test_every=0, lr=0.3)
    rows = read_rows(out / "metrics.jsonl")
    rows[-1]["test_accuracy"] = 99.5  # better than it will be
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = alone(out=out, epochs=2, test_every=0, lr=0.3, resume=True)
    assert first["best"] == first["value"]
    assert (second["best"], second["value"]) == (99.5, read_rows(out / "metrics.jsonl")[-1]["test_accuracy"])


def test_every_strategy_takes_the_same_updates_and_samples(process_world: ProcessWorlds, tmp_path: Path) -> None:
    """Of 54 samples, 4 ranks with batch 4 take 48 in 3 updates; what is left is too little for each of them."""
    specs = {name: name for name in registry.TABLE["strategies"]}
    specs["sequence"] = "sequence([local_sgd])"  # one part, in the one epoch
    specs |= {"daso": "daso(warmup_epochs=0, cooldown_epochs=0)", "halves": "local_parallel(blocks=2)"}
    specs |= {"pipeline in halves": "pipeline(blocks=2)"}
    settings = {"task": "synthetic(samples=54, width=8, depth=3)", "batch_size": 4, "epochs": 1}
    for done in process_world.run(work_done, 4, list(specs.values()), settings, str(tmp_path)):
        assert dict(zip(specs, done, strict=True)) == dict.fromkeys(specs, (3, 48))


def resumed_with_smaller_batches(comm: Comm, folder: str) -> tuple[int, str]:
    """The step that a run goes on from; and what is said of a checkpoint from when batches were a shard's."""
    config = RunConfig(task="synthetic(samples=64, width=8)", strategy="local_parallel", epochs=1, out=Path(folder))
    Run(config, comm, torch.device("cpu")).run()
    run = Run(config.model_copy(update={"resume": True}), comm, torch.device("cpu"))
    run._resume()
    run.folder.release()
    for manifest in Path(folder).rglob(f"rank-{comm.rank}.json"):
        text = json.loads(manifest.read_text())
        del text["identity"]["shards"]
        rewrite(manifest, text)
    again = Run(config.model_copy(update={"resume": True}), comm, torch.device("cpu"))
    with pytest.raises(RunError) as caught:
        again._resume()
    again.folder.release()
    return run.at.step, str(caught.value)


def test_a_run_whose_batches_were_smaller_is_not_gone_on_with(process_world: ProcessWorlds, tmp_path: Path) -> None:
    for step, told in process_world.run(resumed_with_smaller_batches, 2, str(tmp_path / "run")):
        assert step == 1
        assert "of another run (shards: None there, 1 here)" in told


def test_a_finished_run_is_not_written_over(tmp_path: Path) -> None:
    alone(out=tmp_path / "run", epochs=1)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    with pytest.raises(tw.UsageError, match="holds a run already"):
        alone(out=tmp_path / "run", epochs=1)
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_fewer_samples_than_ranks_is_refused(process_world: ProcessWorlds, tmp_path: Path) -> None:
    messages = process_world.run(too_few, 3, str(tmp_path / "run"))
    assert all("2 samples cannot be shared by 3 ranks" in message for message in messages)


def too_few(comm: Comm, folder: str) -> str:
    with pytest.raises(tw.UsageError) as caught:
        train(comm, {"task": "synthetic(samples=2)", "out": folder})
    return str(caught.value)


@pytest.mark.parametrize("samples", [3, 7, 33, 65])
def test_ragged_last_batches_neither_hang_nor_fail(process_world: ProcessWorlds, tmp_path: Path, samples: int) -> None:
    settings = {"task": f"synthetic(samples={samples}, width=8)", "model": "mlp(norm=True)", "epochs": 1}
    settings["batch_size"] = 4
    if samples == 3:  # one sample a rank is all there is
        settings["model"] = "mlp"
    results = process_world.run(train, 3, {**settings, "out": str(tmp_path / "run")})
    assert results[0]["steps"] == max(1, samples // 12 + (samples % 12 // 3 >= 2))


def test_seconds_include_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **options: Any) -> dict[str, float]:
        time.sleep(0.3)
        return evaluate(*args, **options)

    monkeypatch.setattr(recorder, "evaluate", slow)
    summary = alone(out=tmp_path, epochs=2)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows[0]["seconds"] > 0.3
    assert summary["seconds"] >= rows[1]["seconds"] > rows[0]["seconds"] + 0.3
