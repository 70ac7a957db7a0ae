"""thinwire in Lightning's Trainer: what our own trainer computes and sends, and exact resume."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
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
CYCLING = "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=0, stability=0)"  # in the second epoch


def data(rank: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(STEPS * BATCH, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (len(inputs),), generator=generator))


class Batches:
    """A loader with a state, without which Lightning gives the first batches again in the middle of an epoch."""

    def __init__(self, rank: int) -> None:
        self.batches, self.done = list(DataLoader(data(rank), BATCH)), 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        self.done %= STEPS
        for batch in self.batches[self.done :]:
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


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


def fit(
    comm: Comm, kind: str, spec: str, folder: Path, stop: int | None = None, begin: Path | None = None, **options: Any
) -> tuple[Any, ...]:
    """Train by Lightning, from the checkpoint `begin`; with `stop` in two runs, of which the second goes on."""
    from thinwire.integrations.lightning import AttachStrategy, RoundsStrategy

    warnings.simplefilter("ignore")
    with launched(comm):
        for last in [None] if stop is None else [stop, None]:
            strategy = (AttachStrategy if kind == "attach" else RoundsStrategy)(spec)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=comm.size, strategy=strategy, logger=False, enable_progress_bar=False,
                enable_model_summary=False, max_epochs=EPOCHS, max_steps=last or -1, use_distributed_sampler=False,
                num_sanity_val_steps=0, default_root_dir=folder,
                **{"limit_val_batches": 0, "enable_checkpointing": False, **options},
            )  # fmt: skip
            module, path = Module(), folder / "stopped.ckpt"
            resumed = path if stop is not None and last is None else begin
            trainer.fit(
                module, Batches(comm.rank), DataLoader(data(comm.rank), BATCH),
                ckpt_path=resumed, weights_only=True if resumed else None,
            )  # fmt: skip
            if last is not None:
                trainer.save_checkpoint(path)
    handle = strategy.exchange if kind == "attach" else strategy.rounds
    sent = sum(row["wire_bytes"] for row in handle.ledger.rows() if row["purpose"] == "train")
    handle.close()
    return weights(module.net), sent


def by_prepare(comm: Comm, spec: str, in_epochs: bool = False) -> tuple[dict[str, Tensor], int]:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    named = nn.Sequential(OrderedDict(net=copy.deepcopy(MODELS[0])))  # as in the module: names are seeds of rounding
    loss = nn.functional.cross_entropy
    trainer = tw.prepare(spec, model=named, comm=comm, loss=loss, optimizer=optimizer, epochs=EPOCHS)
    for _ in range(EPOCHS):
        for batch in DataLoader(data(comm.rank), BATCH):
            trainer.step(batch)
        if in_epochs:
            trainer.end_epoch()
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


def from_a_link(comm: Comm, folder: Path, moved: Path) -> list[Any]:
    """A run, and one that resumes from the newest checkpoint, to which Lightning's last.ckpt is a link."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(folder, every_n_train_steps=3, save_last="link", save_top_k=-1)
    whole = fit(comm, "rounds", "diloco(every=4)", folder, enable_checkpointing=True, callbacks=[saving])
    comm.barrier()
    if comm.rank == 0:
        assert (folder / "last.ckpt").is_symlink()
        (folder / "last.ckpt").unlink()
        (folder / "last.ckpt").symlink_to("epoch=1-step=9.ckpt")
        folder.rename(moved)
    comm.barrier()
    return [whole, fit(comm, "rounds", "diloco(every=4)", moved, None, moved / "last.ckpt")]


def test_a_link_to_a_checkpoint_stands_for_it(process_world: ProcessWorlds, tmp_path: Path) -> None:
    for (whole, _), (resumed, _) in process_world.run(from_a_link, 2, tmp_path / "run", tmp_path / "moved"):
        assert not same(whole, dict(MODELS[0].state_dict()))
        assert same(whole, resumed)


def by_prepare_in_epochs(comm: Comm) -> tuple[dict[str, Tensor], int]:
    return by_prepare(comm, CYCLING, in_epochs=True)


def test_daso_trains_and_sends_what_our_own_trainer_does_epoch_by_epoch(
    process_world: ProcessWorlds, tmp_path: Path
) -> None:
    ours = process_world.run(by_prepare_in_epochs, 2)
    for (mine, my_bytes), (theirs, their_bytes) in zip(
        ours, process_world.run(fit, 2, "rounds", CYCLING, tmp_path), strict=True
    ):
        assert same(mine, theirs)
        assert my_bytes == their_bytes


def epoch_of_daso(comm: Comm, folder: Path) -> int:
    """The last of two epochs, as daso counts them, with a validation and a checkpoint in every second step."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    counted = []

    class Look(Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            counted.append(trainer.strategy.rounds.state_dict()["rounds"]["counts"]["epoch"])

    saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    options = {"limit_val_batches": 1, "val_check_interval": 2, "enable_checkpointing": True}
    fit(comm, "rounds", CYCLING, folder, callbacks=[saving, Look()], **options)
    return counted[0]


def test_daso_counts_no_meetings_for_validations_and_checkpoints(process_world: ProcessWorlds, tmp_path: Path) -> None:
    assert process_world.run(epoch_of_daso, 2, tmp_path) == [EPOCHS - 1] * 2


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
