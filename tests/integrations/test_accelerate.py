"""thinwire in a loop with Accelerate: a small GPT-2, what our own trainer sends, and exact resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.frameworks import BATCH, EPOCHS, FEEDBACK, RANKS, STEPS, by_prepare, gpt2, launched, texts
from tests.training import same, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.errors import UsageError

accelerate = pytest.importorskip("accelerate", reason="needs the extra thinwire[accelerate]")
pytest.importorskip("transformers", reason="needs the extra thinwire[huggingface]")

CASES = [("attach", FEEDBACK), ("rounds", "local_sgd(every=3)"), ("rounds", "diloco(every=4)")]
ACCUMULATED = 2  # batches in a step
SAVED = 7 * ACCUMULATED  # batches before the checkpoint, which is in the middle of the second epoch


def prepared(kind: str, spec: str) -> tuple[Any, ...]:
    from thinwire.integrations.accelerate import attach, rounds

    torch.manual_seed(1)
    loading = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)  # else the order of an epoch is lost
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, dataloader_config=loading)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    batches = torch.utils.data.DataLoader(texts(STEPS * BATCH * ACCUMULATED), BATCH, shuffle=True)
    model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, batches)
    handle = (attach if kind == "attach" else rounds)(model, spec, accelerator)
    return accelerator, model, optimizer, schedule, batches, handle


def fit(comm: Comm, kind: str, spec: str, folder: Path, save: bool = False, resume: bool = False) -> tuple[Any, ...]:
    """Train with Accelerate; returns weights, bytes sent in training, and losses."""
    losses = []
    with launched(comm):
        accelerator, model, optimizer, schedule, batches, handle = prepared(kind, spec)
        position = 0
        if resume:
            accelerator.load_state(folder / "state")
            position = SAVED
        for epoch in range(position // len(batches), EPOCHS):
            batches.set_epoch(epoch)
            skipped = position - epoch * len(batches)
            for batch in accelerator.skip_first_batches(batches, skipped) if skipped else batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                position += 1
                if save and position == SAVED:
                    accelerator.save_state(folder / "state")
            if kind == "rounds":
                handle.together()
    sent = sum(row["wire_bytes"] for row in handle.ledger.rows() if row["purpose"] == "train")
    handle.close()
    return weights(model.module), sent, losses


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
    whole = process_world.run(fit, RANKS, kind, spec, tmp_path, True)
    assert sorted(path.name for path in (tmp_path / "state" / "thinwire").iterdir()) == [
        "rank-0.safetensors", "rank-1.safetensors",
    ]  # fmt: skip
    resumed = process_world.run(fit, RANKS, kind, spec, tmp_path, False, True)
    assert all(same(one[0], other[0]) for one, other in zip(whole, resumed, strict=True))


def saved_model_and_refusals(comm: Comm, folder: Path) -> tuple[Any, list[str]]:
    """The model after a checkpoint in the middle of a round, and what is refused."""
    from thinwire.integrations.accelerate import attach, rounds

    refused = []
    with launched(comm):
        accelerator, model, optimizer, _, batches, handle = prepared("rounds", "local_sgd(every=100)")
        for _, batch in zip(range(3 * ACCUMULATED), batches, strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
        state = weights(model.module)
        accelerator.wait_for_everyone()
        if comm.rank == 0:
            shutil.rmtree(folder / "thinwire")
        accelerator.wait_for_everyone()
        bare = accelerate.Accelerator(cpu=True)
        for wrong in (
            lambda: attach(model.module, FEEDBACK, accelerator),
            lambda: rounds(bare.prepare(gpt2()), "local_sgd", bare),
            lambda: accelerator.load_state(folder),
        ):
            try:
                wrong()
            except UsageError as error:
                refused.append(str(error))
    handle.close()
    return state, refused


def test_a_checkpoint_in_the_middle_of_a_round_has_the_model_that_ranks_agree_on(
    process_world: ProcessWorlds, tmp_path: Path
) -> None:
    (one, refused), (other, _) = process_world.run(saved_model_and_refusals, RANKS, tmp_path)
    assert same(one, other)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved
    assert all(torch.equal(tensor, one[name]) for name, tensor in saved.items())
    for text, message in zip(
        ("the DDP that accelerator.prepare returned", "has no optimizer", "is missing"), refused, strict=True
    ):
        assert text in message


def two_models(comm: Comm) -> list[int]:
    """The rounds of two models with an optimizer each; the second one trains in every second batch."""
    from thinwire.integrations.accelerate import rounds

    with launched(comm):
        accelerator = accelerate.Accelerator(cpu=True)
        models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        *prepared, one, other = accelerator.prepare(*models, *optimizers)
        handles = [rounds(model, "local_sgd(every=2)", accelerator) for model in prepared]
        for step in range(8):
            for model, optimizer in list(zip(prepared, (one, other), strict=True))[: 2 - step % 2]:
                accelerator.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
    sent = [sum(row["calls"] for row in h.ledger.rows() if row["purpose"] == "train") for h in handles]
    for handle in handles:
        handle.close()
    return sent


def test_of_two_models_each_counts_the_steps_of_its_own_optimizer(process_world: ProcessWorlds) -> None:
    assert process_world.run(two_models, RANKS) == [[4, 2]] * RANKS


def unfrozen(comm: Comm, folder: Path) -> tuple[bool, int, Any]:
    """A layer is unfrozen: the rounds are closed and made again. Returns whether ranks are equal and a state fits."""
    from thinwire.integrations.accelerate import rounds

    with launched(comm):
        accelerator = accelerate.Accelerator(cpu=True)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        net[0].requires_grad_(False)
        model, optimizer = accelerator.prepare(net, optimizer)
        for _ in range(2):
            handle = rounds(model, "local_sgd(every=2)", accelerator)
            for _ in range(3):
                accelerator.backward(model(torch.full((1, 3), comm.rank + 1.0)).sum())
                optimizer.step()
                optimizer.zero_grad()
            handle.together()
            calls = sum(row["calls"] for row in handle.ledger.rows() if row["purpose"] == "train")
            accelerator.save_state(folder)
            before = weights(net)
            accelerator.wait_for_everyone()
            accelerator.load_state(folder)
            accelerator.wait_for_everyone()
            handle.close()
            net[0].requires_grad_(True)
    return same(before, weights(net)), calls, weights(net)


def test_rounds_may_be_closed_and_made_again(process_world: ProcessWorlds, tmp_path: Path) -> None:
    (fits, calls, one), (_, _, other) = process_world.run(unfrozen, RANKS, tmp_path)
    assert fits
    assert calls == 2
    assert same(one, other)
