"""Options of a run: its length in steps, tests and logs within epochs, workers, streams, own optimizers and metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests import own_parts
from tests.run.test_worker import alone, go_on_from, same_files, timeless, train, without_tests
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.compare.report import write_report
from thinwire.compare.results import read_results
from thinwire.config import RunConfig
from thinwire.launch.settings import check_names, check_options, resolve
from thinwire.run.length import Length
from thinwire.run.position import Position
from thinwire.run.records import read_rows
from thinwire.strategies.ab_phases import PhaseLengths

pytestmark = pytest.mark.slow  # each test trains with the command's defaults
NOISY = {"task": "tests.user_task:noisy", "batch_size": 64}  # 23 steps an epoch
READ = "tests.own_parts:read"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_rows(folder / "metrics.jsonl")


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return {key: value for key, value in summary.items() if "second" not in key and key not in UNEQUAL}


UNEQUAL = ("peak_memory_bytes", "waiting_share")


def stopped_and_gone_on(folder: Path, step: int, **settings: Any) -> None:
    """Stop a run at a step, and go on."""
    own_parts.STOP["step"] = step
    with pytest.raises(own_parts.Stopped):
        alone(out=folder, **settings)
    alone(out=folder, **settings, resume=True)


def same_run(one: Path, other: Path) -> None:
    """Weights, rows and summaries are equal, apart from the clock."""
    assert same_files(one, other)
    for file in ("metrics.jsonl", "ledger.jsonl"):
        assert timeless(one, file) == timeless(other, file)
    assert summary_of(one) == summary_of(other)


# ---- the length of a run in steps


@pytest.mark.parametrize("strategy", ["data_parallel", "ab(cutoff=0.6)", "sequence([local_sgd, data_parallel])"])
def test_steps_of_whole_epochs_are_epochs(tmp_path: Path, strategy: str) -> None:
    settings = {**NOISY, "strategy": strategy, "model": "mlp(width=24, depth=3)", "schedule": "cosine(warmup_epochs=1)"}
    alone(**settings, epochs=2, out=tmp_path / "epochs")
    alone(**settings, steps=2 * 23, out=tmp_path / "steps")
    same_run(tmp_path / "epochs", tmp_path / "steps")


def test_steps_cut_the_last_epoch_short(tmp_path: Path) -> None:
    summary = alone(**NOISY, steps=30, out=tmp_path / "run")
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (30, 2, 1437 + 7 * 64)
    first, second = rows_of(tmp_path / "run")
    assert [(row["step"], row["epoch"]) for row in (first, second)] == [(23, 1), (30, 2)]
    assert second["test_accuracy"] == summary["value"]
    less = alone(**NOISY, steps=3, out=tmp_path / "less")
    assert (less["steps"], less["epochs"]) == (3, 1)
    again = alone(**NOISY, steps=3, out=tmp_path / "less", resume=True)  # nothing is left to train
    assert again["value"] == less["value"]


def test_the_schedule_ends_with_the_last_step() -> None:
    seen: list[tuple[float, float]] = []

    def factor(done: float, total: float) -> float:
        seen.append((done, total))
        return 1.0

    Length(None, 30, 23).schedule(factor)(29)
    Length(2, None, 23).schedule(factor)(45)
    Length(None, 30, None).schedule(factor)(14)  # a stream: the run is one epoch
    assert seen == [(29.5 / 23, 30 / 23), (45.5 / 23, 2.0), (14.5 / 30, 1.0)]
    assert Length(None, 30, 23).epoch_length(Position(epoch=1, batch=2, step=25)) == 7


def test_a_run_of_steps_can_go_on_within_its_last_epoch(tmp_path: Path) -> None:
    settings = {**NOISY, "schedule": "constant"}
    alone(**settings, steps=40, out=tmp_path / "whole")
    alone(**settings, steps=30, out=tmp_path / "cut")
    alone(**settings, steps=40, out=tmp_path / "cut", resume=True)
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    alone(**settings, epochs=2, out=tmp_path / "cut", resume=True)
    alone(**settings, epochs=2, out=tmp_path / "epochs")
    assert same_files(tmp_path / "epochs", tmp_path / "cut")
    with pytest.raises(tw.UsageError, match="--steps 5, but 46 are done already; give more steps"):
        alone(**settings, steps=5, out=tmp_path / "cut", resume=True)


CUT_SHORT = [
    "data_parallel(reducer=error_feedback(maxnorm(bits=4)))",
    "diloco(every=4, fragments=2)",
    "daso(ranks_per_node=2, warmup_epochs=1, cooldown_epochs=1)",
    "ab(group_size=2, sync_every=5, warmup=3, rebound=1, cutoff=0.5)",
    "ist(local_steps=5)",
    "local_parallel(blocks=2)",
]


def cut_short(comm: Comm, strategy: str, folder: str) -> None:
    """12 steps an epoch, tests and logs within, the third epoch cut short; stopped in it, and gone on."""
    settings = {
        "task": "tests.user_task:noisy", "model": "mlp(width=24, depth=3, norm=True)", "strategy": strategy,
        "steps": 31, "test_every": "7steps", "log_every": 3, "checkpoint_every": 4, "keep": 99,
    }  # fmt: skip
    train(comm, {**settings, "out": f"{folder}/whole"})
    go_on_from(comm, 28, settings, folder, "cut")
    train(comm, {**settings, "test_every": 0, "log_every": 0, "out": f"{folder}/plain"})


def settled_rows(folder: Path, strategy: str) -> list[dict[str, Any]]:
    """Rows without what depends on the clock: within an epoch, how much of an exchange in flight has been sent."""
    rows = timeless(folder, "metrics.jsonl")
    if "fragments" not in strategy and "daso" not in strategy:
        return rows
    return [{k: v for k, v in row.items() if "bytes" not in k or "train_loss" in row} for row in rows]


@pytest.mark.parametrize("strategy", CUT_SHORT)
def test_a_run_with_tests_and_logs_within_epochs_goes_on_exactly_and_trains_as_without(
    process_world: ProcessWorlds, tmp_path: Path, strategy: str
) -> None:
    process_world.run(cut_short, 4, strategy, str(tmp_path))
    whole, cut, plain = (tmp_path / name for name in ("whole", "cut", "plain"))
    assert same_files(whole, cut)
    assert settled_rows(whole, strategy) == settled_rows(cut, strategy)
    assert same_files(whole, plain), "a test in mid-epoch reads, and changes nothing"
    after_epochs = [row for row in rows_of(whole) if "train_loss" in row]
    assert [row["training_bytes"] for row in after_epochs] == [row["training_bytes"] for row in rows_of(plain)]
    assert [row["step"] for row in after_epochs] == [12, 24, 31]
    assert [row["step"] for row in rows_of(whole) if "test_accuracy" in row] == [7, 14, 21, 28, 31]
    assert [row["step"] for row in rows_of(whole) if "lr" in row] == list(range(3, 31, 3))


def test_ab_plans_its_phases_for_the_steps_of_the_run(tmp_path: Path) -> None:
    alone(**NOISY, strategy="ab(cutoff=0.6)", model="mlp(width=24, depth=3)", steps=60, out=tmp_path)
    manifest = next((tmp_path / "checkpoints").glob("step-*60/rank-0.json"))
    planned = json.loads(manifest.read_text())["tree"]["strategy"]["phases"]
    assert planned == vars(PhaseLengths().phases(epochs=None, epoch_steps=0, steps=60))
    assert planned["joint_start"] < 60


# ---- rows within epochs


def test_a_row_within_an_epoch_says_what_happened_since_the_last(tmp_path: Path) -> None:
    alone(**NOISY, epochs=2, log_every=10, test_every="15steps", schedule="cosine", lr=0.1, out=tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [10, 15, 20, 23, 30, 40, 45, 46]
    assert [row["epoch"] for row in rows] == [pytest.approx(row["step"] / 23) for row in rows]
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [10, 20, 30, 40]
    assert [row["lr"] for row in logged] == [
        pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * (row["step"] - 0.5) / 46))) for row in logged
    ]
    assert all(row["samples_per_second"] > 0 for row in rows)
    epochs = [row for row in rows if "train_loss" in row]
    assert [row["step"] for row in epochs] == [23, 46]
    assert 10 * sum(row["loss"] for row in logged[:2]) < 23 * epochs[0]["train_loss"]
    assert [row["step"] for row in rows if "test_accuracy" in row] == [15, 30, 45, 46]


def test_a_log_at_the_end_of_an_epoch_is_in_its_row(tmp_path: Path) -> None:
    alone(**NOISY, epochs=1, log_every=23, out=tmp_path / "run")
    (row,) = rows_of(tmp_path / "run")
    assert row["loss"] == pytest.approx(row["train_loss"])


def test_the_best_metric_is_that_of_any_test(tmp_path: Path) -> None:
    summary = alone(**NOISY, epochs=2, test_every="5steps", lr=0.3, out=tmp_path / "run")
    tested = [row["test_accuracy"] for row in rows_of(tmp_path / "run") if "test_accuracy" in row]
    assert len(tested) == 10
    assert (summary["best"], summary["value"]) == (max(tested), tested[-1])


def test_the_report_reads_rows_within_epochs(tmp_path: Path) -> None:
    alone(
        **NOISY, epochs=4, strategy="sequence([ab(cutoff=0.6), data_parallel])", model="mlp(width=24, depth=3)",
        log_every=5, test_every="9steps", out=tmp_path / "run",
    )  # fmt: skip
    results = read_results(tmp_path / "run")
    assert "Test accuracy over" in write_report(results).read_text()
    rows = [row for row in rows_of(tmp_path / "run") if "test_accuracy" in row]
    reached = rows[3]["test_accuracy"]
    first = next(row for row in rows if row["test_accuracy"] >= reached)
    assert results.entries[0].records[0].seconds_to(reached) == first["train_seconds"]


# ---- how samples are read


@pytest.mark.parametrize("kind", ["stream", "sized", "indexed"])
def test_a_run_that_reads_sample_by_sample_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    """330 samples in batches of 16 are 21 steps an epoch; with a worker they are the same."""
    settings: dict[str, Any] = {"task": f"{READ}(kind={kind})", "checkpoint_every": 5, "log_every": 4}
    alone(**settings, out=tmp_path / "whole")
    assert [row["step"] for row in rows_of(tmp_path / "whole") if "train_loss" in row] == [21, 30]
    for step in (7, 18, 28):
        stopped_and_gone_on(tmp_path / f"cut-{step}", step, **settings)
        same_run(tmp_path / "whole", tmp_path / f"cut-{step}")
    alone(**settings, num_workers=1, out=tmp_path / "worker")
    same_run(tmp_path / "whole", tmp_path / "worker")


def read_on_ranks(comm: Comm, strategy: str, folder: str) -> None:
    settings = {"task": READ, "strategy": strategy, "checkpoint_every": 3, "steps": 24, "keep": 99, "batch_size": 15}
    train(comm, {**settings, "out": f"{folder}/whole"})
    for step in (6, 8, 15):  # 330 samples are 11 steps an epoch
        go_on_from(comm, step, settings, folder, f"cut-{step}")


@pytest.mark.parametrize("strategy", ["local_sgd(every=4)", "local_parallel(blocks=2)"])
def test_ranks_share_a_stream(process_world: ProcessWorlds, tmp_path: Path, strategy: str) -> None:
    process_world.run(read_on_ranks, 2, strategy, str(tmp_path))
    whole = tmp_path / "whole"
    assert [row["step"] for row in rows_of(whole)] == [11, 22, 24]
    assert summary_of(whole)["samples"] == 2 * 330 + 2 * 30
    for cut in tmp_path.glob("cut-*"):
        assert same_files(whole, cut)
        assert timeless(whole, "metrics.jsonl") == timeless(cut, "metrics.jsonl")


def test_a_stream_without_a_length_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(tw.UsageError, match=r"--epochs 2, but the training data is a stream without a length.*--steps"):
        alone(task=READ, epochs=2, out=tmp_path / "run")
    with pytest.raises(tw.UsageError, match="gave less than a sample for each of 1 ranks; it must begin anew"):
        alone(task=f"{READ}(count=0)", out=tmp_path / "run")
    summary = alone(task=f"{READ}(kind=sized)", epochs=2, out=tmp_path / "run")
    assert (summary["epochs"], summary["steps"]) == (2, 42)


# ---- own optimizers and metrics


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    alone(**NOISY, epochs=1, optimizer="sgd(momentum=0.5)", out=tmp_path / "named")
    alone(**NOISY, epochs=1, optimizer="tests.own_parts:heavy(momentum=0.5)", out=tmp_path / "own")
    assert same_files(tmp_path / "named", tmp_path / "own")
    settings = {"task": READ, "optimizer": "torch.optim:RAdam(weight_decay=0.1, betas=[0.8, 0.9])", "lr": 0.01}
    alone(**settings, checkpoint_every=4, out=tmp_path / "whole")
    stopped_and_gone_on(tmp_path / "cut", 14, **settings, checkpoint_every=4)
    same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tests.own_parts:worst(factor=2)", lambda accuracy: 2 - accuracy / 50),
        ("tests.own_parts:share", lambda a: a / 100),
    ],
)
def test_a_metric_of_ones_own(tmp_path: Path, name: str, value: Any) -> None:
    plain = alone(**NOISY, epochs=2, out=tmp_path / "plain")
    summary = alone(**NOISY, epochs=2, metric=name, out=tmp_path / "own")
    assert same_files(tmp_path / "plain", tmp_path / "own")
    assert summary["metric"] == name.partition(":")[2].partition("(")[0]
    assert summary["value"] == pytest.approx(value(plain["value"]))
    assert summary["best"] == pytest.approx(value(plain["best"]))
    assert summary["higher_is_better"] is (summary["metric"] == "share")
    results = read_results(tmp_path / "own")
    assert results.sign == (1 if summary["metric"] == "share" else -1)
    assert write_report(results).exists()
    assert alone(**NOISY, epochs=1, metric="loss", out=tmp_path / "loss")["metric"] == "loss"


WRONG = {
    "optimizer": {
        "tests.nowhere:f": "cannot load optimizer 'tests.nowhere:f': No module named 'tests.nowhere'",
        "tests.own_parts:heavi": r"did you mean 'tests.own_parts:heavy'\?",
        "tests.own_parts:one_argument": r"must be a function of \(parameters, lr, /, \*, options…\) that",
        "tests.own_parts:STOP": "must be a function of",
        "tests.own_parts:heavy(momentun=0.5)": "unknown option of heavy 'momentun'; did you mean 'momentum'",
        "tests/own_parts.py:heavy": "cannot be read; expected package.module:function",
        "sdg": "unknown optimizer 'sdg'; did you mean 'sgd'",
    },
    "metric": {
        "tests.own_parts:one_argument": r"must be a function of \(outputs, targets, /, \*, options…\)",
        "tests.own_parts:undecided": "does not say which way is better; write below it: undecided.higher_is_better",
        "tests.own_parts:nothing": "cannot load metric",
        "f1": "metric='f1'; possible: 'accuracy'",
    },
}


def check_all(config: RunConfig) -> None:
    check_names(config)
    check_options(config)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in WRONG for name in WRONG[kind]])
def test_what_is_wrong_with_ones_own_is_said_before_ranks_are_started(kind: str, name: str) -> None:
    with pytest.raises(tw.UsageError, match=WRONG[kind][name]):
        check_all(RunConfig(**{kind: name}))


def test_what_ones_own_returns_is_checked(tmp_path: Path) -> None:
    with pytest.raises(tw.UsageError, match=r"no_optimizer' returned str; expected a torch.optim.Optimizer"):
        alone(**NOISY, optimizer="tests.own_parts:no_optimizer", out=tmp_path / "run")
    with pytest.raises(tw.UsageError, match=r"metric matrix returned a tensor of shape \(\d+, 10\) for \d+ samples"):
        alone(**NOISY, epochs=1, metric="tests.own_parts:matrix", out=tmp_path / "run")


# ---- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps=0 is not possible: should be greater than 0"),
        ({"steps": -3}, "steps=-3 is not possible"),
        ({"steps": 5, "epochs": 2}, "steps: 5 steps and 2 epochs are two lengths of one run; give one of them"),
        ({"test_every": -1}, "test_every: -1 is not possible: give epochs as 2, steps as 200steps"),
        ({"test_every": "0steps"}, "test_every: 0steps is not possible"),
        ({"test_every": "often"}, "test_every: often is not possible"),
        ({"log_every": -1}, "log_every=-1 is not possible: should be greater than or equal to 0"),
        ({"num_workers": -1}, "num_workers=-1 is not possible"),
        ({"track": "paper"}, "track='paper' is not possible: should be 'tensorboard', 'wandb'"),
        ({"resume": "maybe"}, "resume='maybe' is not possible"),
    ],
)
def test_impossible_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.UsageError, match=message):
        resolve(None, given)


def test_a_task_has_one_length(tmp_path: Path) -> None:
    with pytest.raises(tw.UsageError, match="3 steps and 2 epochs are two lengths of one run"):
        alone(task="tests.own_parts:two_lengths", out=tmp_path / "run")
    assert alone(task="tests.own_parts:two_lengths", steps=2, out=tmp_path / "run")["steps"] == 2


def test_one_length_takes_the_place_of_the_other(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("epochs = 3\n")
    assert (resolve(file, {"steps": 7}).steps, resolve(file, {"steps": 7}).epochs) == (7, None)
    alone(**NOISY, steps=4, out=tmp_path / "run")
    assert "epochs" not in (tmp_path / "run" / "config.toml").read_text()
    config = resolve(None, {"out": tmp_path / "run", "resume": True, "epochs": 1})
    assert (config.steps, config.epochs) == (None, 1)


def test_tests_and_logs_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    alone(**NOISY, steps=10, out=tmp_path / "run")
    asked = {"test_every": "4 steps", "log_every": 2, "num_workers": 1, "steps": 14}
    config = resolve(None, {"out": tmp_path / "run", "resume": True, **asked})
    assert (config.test_every, config.log_every, config.num_workers, config.steps) == ("4steps", 2, 1, 14)


def test_rows_of_epochs_are_the_same_with_rows_between(tmp_path: Path) -> None:
    for every in (0, 6):
        alone(**NOISY, epochs=2, log_every=every, out=tmp_path / str(every))
    plain, logged = (without_tests(tmp_path / name) for name in ("0", "6"))
    rows = [{k: v for k, v in row.items() if k not in ("loss", "lr")} for row in logged if "train_loss" in row]
    assert rows == plain


def test_a_run_that_failed_before_its_first_checkpoint_leaves_no_rows(tmp_path: Path) -> None:
    own_parts.STOP["step"] = 5
    with pytest.raises(own_parts.Stopped):
        alone(task=READ, log_every=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
