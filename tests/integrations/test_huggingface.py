"""thinwire in Hugging Face's Trainer: a small GPT-2, what our own trainer sends, and exact resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import BATCH, EPOCHS, FEEDBACK, RANKS, by_prepare, gpt2, launched, texts
from tests.training import same, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.errors import UsageError

transformers = pytest.importorskip("transformers", reason="needs the extra thinwire[huggingface]")
accelerate = pytest.importorskip("accelerate", reason="needs the extra thinwire[huggingface]")

CASES = [("attach", FEEDBACK), ("rounds", "local_sgd(every=3)"), ("rounds", "diloco(every=4)")]


def made(kind: str, spec: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """A Trainer with a callback, and that."""
    from thinwire.integrations.huggingface import AttachCallback, RoundsCallback

    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, seed=1,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, ddp_backend="gloo",
        **{"save_strategy": "no", "use_cpu": True, "logging_steps": 1, **options},
    )  # fmt: skip
    trainer = transformers.Trainer(gpt2(), args, train_dataset=texts(), eval_dataset=texts()[:8])
    callback = (AttachCallback if kind == "attach" else RoundsCallback)(trainer, spec)
    trainer.add_callback(callback)
    return trainer, callback


def exchange_of(callback: Any) -> Any:
    return callback.exchange if hasattr(callback, "exchange") else callback.rounds


def bytes_sent(handle: Any) -> int:
    return sum(row["wire_bytes"] for row in handle.ledger.rows() if row["purpose"] == "train")


def fit(comm: Comm, kind: str, spec: str, folder: Path, resume: bool | str = False, **options: Any) -> tuple[Any, ...]:
    """Train by the Trainer; returns weights, bytes sent in training, and the losses that it logged."""
    with launched(comm):
        trainer, callback = made(kind, spec, folder, **options)
        trainer.train(resume_from_checkpoint=resume or None)
    handle = exchange_of(callback)
    handle.close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return weights(trainer.model), bytes_sent(handle), losses


@pytest.mark.parametrize(("kind", "spec"), CASES)
def test_it_learns_ranks_are_equal_and_bytes_are_those_of_our_own_trainer(
    process_world: ProcessWorlds, tmp_path: Path, kind: str, spec: str
) -> None:
    found = process_world.run(fit, RANKS, kind, spec, tmp_path)
    ours = process_world.run(by_prepare, RANKS, f"data_parallel(reducer={spec})" if kind == "attach" else spec)
    assert [sent for _, sent, _ in found] == ours
    assert same(found[0][0], found[1][0])
    losses = found[0][2]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("kind", "spec"), CASES)
def test_a_resumed_run_ends_bit_for_bit_as_the_one_that_went_on(
    process_world: ProcessWorlds, tmp_path: Path, kind: str, spec: str
) -> None:
    options = {"save_strategy": "steps", "save_steps": 8}
    whole = process_world.run(fit_with, RANKS, kind, spec, tmp_path, False, options)
    assert sorted(path.name for path in (tmp_path / "checkpoint-8" / "thinwire").iterdir()) == [
        "rank-0.safetensors", "rank-1.safetensors",
    ]  # fmt: skip
    copied = shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "elsewhere" / "best")
    resumed = process_world.run(fit_with, RANKS, kind, spec, tmp_path / "new", str(copied), options)
    assert all(same(one[0], other[0]) for one, other in zip(whole, resumed, strict=True))
    for newer in tmp_path.glob("checkpoint-1*"):
        newer.rename(tmp_path / f"old-{newer.name}")
    resumed = process_world.run(fit_with, RANKS, kind, spec, tmp_path, True, options)
    assert all(same(one[0], other[0]) for one, other in zip(whole, resumed, strict=True))


def fit_with(
    comm: Comm, kind: str, spec: str, folder: Path, resume: bool | str, options: dict[str, Any]
) -> tuple[Any, ...]:
    return fit(comm, kind, spec, folder, resume, **options)


def refused_on_a_cpu_that_was_not_asked_for(comm: Comm, folder: Path) -> str:
    try:
        fit(comm, "rounds", "local_sgd", folder, use_cpu=False)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the Trainer is distributed")
def test_ranks_that_the_trainer_trains_alone_are_refused(process_world: ProcessWorlds, tmp_path: Path) -> None:
    for message in process_world.run(refused_on_a_cpu_that_was_not_asked_for, RANKS, tmp_path):
        assert "started 2 ranks, but the Trainer trains each of them alone" in message


def trained_twice(comm: Comm, kind: str, spec: str, folder: Path) -> tuple[Any, list[int]]:
    sent = []
    with launched(comm):
        trainer, callback = made(kind, spec, folder)
        for _ in range(2):
            trainer.train()
            sent.append(bytes_sent(exchange_of(callback)))
    exchange_of(callback).close()
    return weights(trainer.model), sent


@pytest.mark.parametrize(("kind", "spec"), [CASES[0], CASES[2]])
def test_a_trainer_may_train_again(process_world: ProcessWorlds, tmp_path: Path, kind: str, spec: str) -> None:
    (one, (first, second)), (other, _) = process_world.run(trained_twice, RANKS, kind, spec, tmp_path)
    assert same(one, other)
    assert second == (2 * first if kind == "attach" else first), "a DDP keeps its exchange; rounds begin anew"


def messages_in_steps(comm: Comm, folder: Path) -> list[str]:
    """What ranks that train separately tell each other between two meetings, besides losses to log."""
    told = []
    gather = accelerate.Accelerator.gather

    def note(accelerator: Any, tensor: Any) -> Any:
        told.append(f"gather of {tensor}")
        return gather(accelerator, tensor)

    with launched(comm), pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.Accelerator, "gather", note)
        trainer, callback = made("rounds", "local_sgd(every=3)", folder, logging_steps=100)
        trainer.train()
    callback.rounds.close()
    return told


def test_ranks_that_train_separately_send_nothing_in_between(process_world: ProcessWorlds, tmp_path: Path) -> None:
    assert process_world.run(messages_in_steps, RANKS, tmp_path) == [[], []]


def epoch_of_daso(comm: Comm, folder: Path) -> int:
    """The epochs that daso has counted after a run with an evaluation and a checkpoint in every second step."""
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    with launched(comm):
        trainer, callback = made(
            "rounds", "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=0)", folder, **options
        )
        trainer.train()
    callback.rounds.close()
    counted: int = callback.rounds.state_dict()["rounds"]["counts"]["epoch"]
    return counted


def test_daso_counts_the_epochs_of_the_trainer_and_not_its_checkpoints(
    process_world: ProcessWorlds, tmp_path: Path
) -> None:
    assert process_world.run(epoch_of_daso, RANKS, tmp_path) == [EPOCHS] * RANKS
