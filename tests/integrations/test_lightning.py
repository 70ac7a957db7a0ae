"""thinwire in Lightning's Trainer: what our own trainer computes and sends, and exact resume."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from tests.frameworks import FEEDBACK, launched
from tests.training import MODELS, same, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm

lightning = pytest.importorskip("lightning", reason="needs the extra thinwire[lightning]")

STEPS, EPOCHS, BATCH = 6, 2, 8


def data(rank: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(STEPS * BATCH, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (len(inputs),), generator=generator))


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = copy.deepcopy(MODELS[0])

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(comm: Comm, kind: str, spec: str, folder: Path, stop: int | None = None, **options: Any) -> tuple[Any, ...]:
    """Train by Lightning; with `stop` in two runs, the second of which resumes from a checkpoint of so many steps."""
    from thinwire.integrations.lightning import AttachStrategy, RoundsStrategy

    warnings.simplefilter("ignore")
    with launched(comm):
        for last in [None] if stop is None else [stop, None]:
            strategy = (AttachStrategy if kind == "attach" else RoundsStrategy)(spec)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=comm.size, strategy=strategy, logger=False, enable_progress_bar=False,
                enable_model_summary=False, enable_checkpointing=False, max_epochs=EPOCHS, max_steps=last or -1,
                use_distributed_sampler=False, num_sanity_val_steps=0, default_root_dir=folder,
                **{"limit_val_batches": 0, **options},
            )  # fmt: skip
            module, path = Module(), folder / "stopped.ckpt"
            resumes = stop is not None and last is None
            trainer.fit(
                module, DataLoader(data(comm.rank), BATCH), DataLoader(data(comm.rank), BATCH),
                ckpt_path=path if resumes else None, weights_only=True if resumes else None,
            )  # fmt: skip
            if last is not None:
                trainer.save_checkpoint(path)
    handle = strategy.exchange if kind == "attach" else strategy.rounds
    sent = sum(row["wire_bytes"] for row in handle.ledger.rows() if row["purpose"] == "train")
    handle.close()
    return weights(module.net), sent


def by_prepare(comm: Comm, spec: str) -> tuple[dict[str, Tensor], int]:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    named = nn.Sequential(OrderedDict(net=copy.deepcopy(MODELS[0])))  # as in the module: names are seeds of rounding
    trainer = tw.prepare(spec, model=named, comm=comm, loss=nn.functional.cross_entropy, optimizer=optimizer)
    for _ in range(EPOCHS):
        for batch in DataLoader(data(comm.rank), BATCH):
            trainer.step(batch)
    trainer.end_epoch()
    rows = [row for row in comm.ledger.rows() if row["purpose"] == "train"]
    return weights(named.net), sum(row["wire_bytes"] for row in rows)


CASES = [
    ("attach", "maxnorm(bits=4)"),
    ("attach", FEEDBACK),
    ("rounds", "local_sgd(every=3)"),
    ("rounds", "diloco(every=4)"),
]


@pytest.mark.parametrize(("kind", "spec"), CASES)
def test_it_trains_and_sends_what_our_own_trainer_does(
    process_world: ProcessWorlds, tmp_path: Path, kind: str, spec: str
) -> None:
    ours = process_world.run(by_prepare, 2, f"data_parallel(reducer={spec})" if kind == "attach" else spec)
    found = process_world.run(fit, 2, kind, spec, tmp_path)
    for (mine, my_bytes), (theirs, their_bytes) in zip(ours, found, strict=True):
        trained = dict(MODELS[0].named_parameters()) if kind == "attach" else mine  # DDP sends rank 0's buffers itself
        assert all(torch.equal(mine[name], theirs[name]) for name in trained)
        assert my_bytes == their_bytes


@pytest.mark.parametrize(("kind", "spec"), CASES[1:])
def test_a_stopped_run_ends_bit_for_bit_as_the_one_that_went_on(
    process_world: ProcessWorlds, tmp_path: Path, kind: str, spec: str
) -> None:
    (tmp_path / "stopped").mkdir()
    resumed = process_world.run(fit, 2, kind, spec, tmp_path / "stopped", 6)
    assert len(list((tmp_path / "stopped" / "stopped.ckpt.ranks").iterdir())) == 2
    whole = process_world.run(fit_with_a_meeting, 2, kind, spec, tmp_path)
    assert all(same(one[0], other[0]) for one, other in zip(resumed, whole, strict=True))


def fit_with_a_meeting(comm: Comm, kind: str, spec: str, folder: Path) -> tuple[Any, ...]:
    """A run that is not stopped, but saves after the same step: there, ranks meet."""
    from lightning.pytorch.callbacks import Callback

    class Save(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(folder / "passing.ckpt")

    return fit(comm, kind, spec, folder, callbacks=[Save()])


def equal_in_validation(comm: Comm, folder: Path) -> bool:
    from lightning.pytorch.callbacks import Callback

    seen = []

    class Look(Callback):  # type: ignore[misc]
        def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            mine = torch.cat([p.detach().flatten() for p in module.parameters()])
            seen.append(all(torch.equal(mine, other) for other in comm.all_gather(mine)))

    fit(comm, "rounds", "local_sgd(every=4)", folder, limit_val_batches=1, val_check_interval=3, callbacks=[Look()])
    return seen == [True] * 4


def test_ranks_meet_before_a_validation_in_the_middle_of_an_epoch(process_world: ProcessWorlds, tmp_path: Path) -> None:
    assert all(process_world.run(equal_in_validation, 2, tmp_path))
