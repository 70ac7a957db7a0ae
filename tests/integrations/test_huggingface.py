"""thinwire in Hugging Face's Trainer: a small GPT-2, what our own trainer sends, and exact resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.training import same, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm

transformers = pytest.importorskip("transformers", reason="needs the extra thinwire[huggingface]")
pytest.importorskip("accelerate", reason="needs the extra thinwire[huggingface]")

STEPS, EPOCHS, BATCH, RANKS = 6, 2, 4, 2
FEEDBACK = "error_feedback(maxnorm(bits=4))"
CASES = [("attach", FEEDBACK), ("rounds", "local_sgd(every=3)"), ("rounds", "diloco(every=4)")]


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def texts() -> list[dict[str, Tensor]]:
    """Sequences that count up: what comes next can be learned."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 32, (STEPS * BATCH * RANKS,), generator=generator)
    lines = [(start + torch.arange(16)) % 32 for start in first]
    return [{"input_ids": line, "labels": line} for line in lines]


def fit(comm: Comm, kind: str, spec: str, folder: Path, resume: bool = False, **options: Any) -> tuple[Any, ...]:
    """Train by the Trainer; returns weights, bytes sent in training, and the losses that it logged."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from thinwire.integrations.huggingface import AttachCallback, RoundsCallback

    names = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_WORLD_SIZE": comm.size}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "ACCELERATE_USE_CPU": "true"}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        args = transformers.TrainingArguments(
            output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, use_cpu=True, seed=1,
            learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, report_to=[], disable_tqdm=True,
            ddp_backend="gloo", **{"save_strategy": "no", **options},
        )  # fmt: skip
        trainer = transformers.Trainer(gpt2(), args, train_dataset=texts(), eval_dataset=texts()[:8])
        callback = (AttachCallback if kind == "attach" else RoundsCallback)(trainer, spec)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume or None)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.clear()
        os.environ.update(before)
    handle = callback.exchange if kind == "attach" else callback.rounds
    sent = sum(row["wire_bytes"] for row in handle.ledger.rows() if row["purpose"] == "train")
    handle.close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return weights(trainer.model), sent, losses


def by_prepare(comm: Comm, spec: str) -> int:
    """The bytes of our own trainer for so many steps; they depend on the parameters alone."""

    def loss(output: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    trainer = tw.prepare(
        spec, model=gpt2(), comm=comm, optimizer=lambda p: torch.optim.SGD(p, 0.01), loss=loss, epochs=EPOCHS
    )
    for _ in range(EPOCHS):
        batches = [(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long))] * STEPS
        for batch in tw.epoch(trainer, batches, comm):
            trainer.step(batch)
    return sum(row["wire_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train")


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
    for newer in tmp_path.glob("checkpoint-1*"):
        newer.rename(tmp_path / f"old-{newer.name}")
    resumed = process_world.run(fit_with, RANKS, kind, spec, tmp_path, True, options)
    assert all(same(one[0], other[0]) for one, other in zip(whole, resumed, strict=True))


def fit_with(comm: Comm, kind: str, spec: str, folder: Path, resume: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    return fit(comm, kind, spec, folder, resume, **options)
