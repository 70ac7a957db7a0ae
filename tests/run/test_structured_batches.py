"""Runs of tasks whose samples are dicts of different lengths, with masks."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.run.test_worker import same_files, timeless, train
from tests.training import seeded
from tests.user_task import MaskedNet, pad, sentences
from tests.worlds import ProcessWorlds, World, on_threads
from thinwire.comm.base import Comm
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.plan.planner import study
from thinwire.plan.workload import TaskWorkload
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.evaluation import evaluate
from thinwire.run.position import Position
from thinwire.run.records import read_rows
from thinwire.run.startup import with_defaults
from thinwire.tasks.metrics import Metric

TASK = "tests.user_task:sentences(loss={})"
SPECS = [
    "data_parallel", "local_sgd(every=4)", "diloco(every=4)", "alone", "ab(cutoff=0.5)", "auto",
    "sequence([data_parallel, local_sgd])",
]  # fmt: skip


def run(world: World, out: Path, loss: str, ranks: int = 2, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = world(train, ranks, {"task": TASK.format(loss), "out": out, **settings})[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["own", "weighted"])
@pytest.mark.parametrize("strategy", SPECS)
def test_a_run_learns_and_resumes(tmp_path: Path, process_world: ProcessWorlds, strategy: str, loss: str) -> None:
    world = process_world.run
    straight = run(world, tmp_path / "straight", loss, strategy=strategy, epochs=3)
    run(world, tmp_path / "stopped", loss, strategy=strategy, epochs=3, minutes=1e-6)
    assert len(read_rows(tmp_path / "stopped" / "metrics.jsonl")) == 1
    run(world, tmp_path / "stopped", loss, strategy=strategy, epochs=3, resume=True)
    assert same_files(tmp_path / "straight", tmp_path / "stopped")
    rows = read_rows(tmp_path / "straight" / "metrics.jsonl")
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert straight["value"] == rows[-1]["test_loss"]
    parts = {"train_size"} if loss == "own" else {"train_size", "train_entropy"}
    assert {name for name in rows[0] if name.startswith("train_")} == {"train_loss", "train_seconds"} | parts
    if loss == "weighted":
        total = rows[0]["train_entropy"] + 0.01 * rows[0]["train_size"]
        assert rows[0]["train_loss"] == pytest.approx(total, rel=1e-4)


def test_the_parts_of_an_epoch_survive_a_stop_in_its_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that the loss returns now and then is averaged over the steps in which it does."""
    run(on_threads, tmp_path / "straight", "sometimes", ranks=1, epochs=2)
    before, count = Checkpoints.save, 0

    def stop(self: Checkpoints, *args: Any) -> None:
        nonlocal count
        before(self, *args)
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        run(on_threads, tmp_path / "stopped", "sometimes", ranks=1, epochs=2, checkpoint_every=4)
    monkeypatch.undo()
    run(on_threads, tmp_path / "stopped", "sometimes", ranks=1, epochs=2, checkpoint_every=4, resume=True)
    one, other = (timeless(tmp_path / name, "metrics.jsonl") for name in ("straight", "stopped"))
    assert one == other
    assert [row["train_three"] for row in one] == [3.0, 3.0]


def test_the_loss_is_the_mean_over_all_test_samples() -> None:
    task = sentences(None, 0)
    model = seeded(0, MaskedNet)
    with torch.no_grad():
        whole = float(copy.deepcopy(model).eval()(**pad(task.test))["loss"])  # type: ignore[arg-type]

    def test(comm: Comm) -> float:
        return evaluate(copy.deepcopy(model), task, comm, torch.device("cpu"), batch_size=7)["loss"]

    for ranks in (1, 3):
        assert tw.simulate(test, ranks=ranks) == pytest.approx([whole] * ranks, rel=1e-5)


@pytest.mark.slow
def test_such_tasks_are_planned() -> None:
    task = sentences(None, 0)
    config = with_defaults(RunConfig(task=TASK.format("own"), batch_size=25), task, 2)
    for spec in ("data_parallel", "diloco"):
        assert study(spec, TaskWorkload(config, task), [0, 1], 0.05) is not None


def test_a_metric_may_be_a_function_of_model_and_batch() -> None:
    def correct(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["ids"], batch["mask"])["logits"].argmax(-1) == batch["labels"]

    correct.higher_is_better = True  # type: ignore[attr-defined]
    task = replace(sentences(None, 0), metric=correct)
    model = seeded(0, MaskedNet)

    def test(comm: Comm) -> float:
        return evaluate(copy.deepcopy(model), task, comm, torch.device("cpu"), batch_size=7)["correct"]

    whole = correct(copy.deepcopy(model).eval(), pad(task.test)).double().mean().item()  # type: ignore[arg-type]
    assert tw.simulate(test, ranks=3) == pytest.approx([whole] * 3)


def test_samples_may_become_tensors_in_the_transform(tmp_path: Path) -> None:
    settings = {"task": "tests.own_parts:words", "out": tmp_path / "run"}
    summary: dict[str, Any] = on_threads(train, 1, settings)[0]
    assert (summary["samples"], summary["steps"]) == (2 * 64, 16)


def test_a_part_of_the_loss_with_a_name_that_is_taken_is_refused_in_the_first_steps(tmp_path: Path) -> None:
    settings = {"task": "tests.own_parts:words(takes_seconds=True)", "out": tmp_path / "run", "log_every": 2}
    with pytest.raises(UsageError, match="the loss returns 'seconds', but every row of metrics has train_seconds"):
        on_threads(train, 1, settings)
    assert not (tmp_path / "run").exists(), "no row of metrics was written"


class OneElement(nn.Linear):
    """A model whose loss has a dimension, as that of several devices has."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).square().mean(0)}


def test_a_loss_of_one_element_is_a_number() -> None:
    samples: Any = [{"x": torch.ones(2)} for _ in range(10)]
    task = tw.Task(samples, samples, (2,), 0, lambda: OneElement(2, 1), loss=None, metric="loss")
    model = seeded(0, lambda: OneElement(2, 1))

    def test(comm: Comm) -> float:
        return evaluate(copy.deepcopy(model), task, comm, torch.device("cpu"), batch_size=4)["loss"]

    assert tw.simulate(test, ranks=1)[0] == pytest.approx(model(torch.ones(1, 2))["loss"].item())


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_metric_is_a_number_if_one_is(higher: bool) -> None:
    metric, nan = Metric("own", higher, None), float("nan")
    at = Position().tested(nan, metric)
    assert at.best is not None
    assert math.isnan(at.best)
    for value in (2.0, nan, 2.0, None):
        at = at.tested(value, metric)
        assert at.best == 2.0


def test_mistakes_of_tasks_are_named() -> None:
    task = sentences(None, 0)
    with pytest.raises(UsageError, match=r"metric accuracy .* needs a loss of \(output, targets\)"):
        tw.Task(task.train, task.test, (), 2, "mlp", loss=None)
    with pytest.raises(UsageError, match="collate_fn=3; give a function"):
        tw.Task(task.train, task.test, (), 2, "mlp", collate_fn=3)  # type: ignore[arg-type]


def test_loaders_collate() -> None:
    task = sentences(None, 0)
    batches = list(tw.loader(task.train, tw.Shard(0, 2), batch_size=10, collate_fn=task.collate_fn))
    assert [len(batch["labels"]) for batch in batches] == [10] * 25
    assert all(batch["ids"].shape == batch["mask"].shape for batch in batches)
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    summed = list(tw.loader(data, tw.Shard(0, 1), batch_size=4, collate_fn=lambda rows: sum(row[0] for row in rows)))
    assert float(sum(summed)) == 28
