"""Runs of Ray Train for tests/integrations/test_ray.py: python -m tests.ray_runs FOLDER

One run trains every case without failures. Then a worker is killed in a run of each of two cases, and Ray restores it.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from tests.frameworks import FEEDBACK, RANKS
from tests.training import PLAIN
from thinwire.integrations.ray import AttachLoop, RoundsLoop

STEPS, EPOCHS, BATCH = 6, 2, 8
SAVED, KILLED = 8, 10  # steps
SPECS = {"attach": FEEDBACK, "local_sgd": "local_sgd(every=3)", "diloco": "diloco(every=4)"}
KILLED_CASES = ("attach", "diloco")


def data(rank: int) -> DataLoader[Any]:
    """A rank's batches."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(STEPS * BATCH, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(0, 3, (len(inputs),), generator=generator)), BATCH)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def train(case: str, folder: Path, saves: bool, kills: bool) -> None:
    """One worker. Writes its weights and what it saw."""
    rank, checkpoint, start = ray.train.get_context().get_world_rank(), ray.train.get_checkpoint(), 0
    model = prepare_model(copy.deepcopy(PLAIN))
    optimizer = sgd(model.parameters())
    if checkpoint:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = SAVED
    rounds = None if case == "attach" else RoundsLoop(model, SPECS[case], optimizer)
    loop = rounds or AttachLoop(model, SPECS[case])
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(data(rank), EPOCHS)), start, None)
    for step, (inputs, targets) in enumerate(batches, start + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if step == SAVED and saves:
            with loop.checkpoint_folder() as new:
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, Path(new, "state.pt"))
                if kills:
                    ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(new))
        if step == KILLED and kills and rank == 1 and not checkpoint:
            assert ray.train.get_all_reported_checkpoints()  # waits until Ray knows of it
            os.kill(os.getpid(), signal.SIGKILL)
    if rounds:
        rounds.rounds.together()
    handle = rounds.rounds if rounds else loop.exchange  # type: ignore[attr-defined]
    with tw.join() as comm:  # the group that Ray made; it is left standing
        ranks = int(comm.sum(torch.ones(1)).item())
    sent = sum(row["wire_bytes"] for row in handle.ledger.rows() if row["purpose"] == "train")
    told = {"sent": sent, "steps": step - start, "ranks": ranks, "standing": torch.distributed.is_initialized()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: p.detach().clone() for name, p in model.module.named_parameters()}, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(told))


def train_all(config: dict[str, Any]) -> None:
    """Every case without a checkpoint, and with one."""
    for case in SPECS:
        train(case, Path(config["folder"], f"{case}-plain"), saves=False, kills=False)
        train(case, Path(config["folder"], f"{case}-whole"), saves=True, kills=False)


def train_killed(config: dict[str, Any]) -> None:
    """A case in which rank 1 is killed after the checkpoint."""
    train(config["case"], Path(config["folder"], f"{config['case']}-killed"), saves=True, kills=True)


def main(folder: Path) -> None:
    """All runs, on a Ray of this machine alone."""
    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    for case in ("", *KILLED_CASES):
        TorchTrainer(
            train_killed if case else train_all,
            train_loop_config={"folder": str(folder), "case": case},
            scaling_config=ray.train.ScalingConfig(num_workers=RANKS),
            run_config=ray.train.RunConfig(
                name=f"run-{case}", storage_path=str(folder),
                failure_config=ray.train.FailureConfig(max_failures=int(case != "")),
            ),
        ).fit()  # fmt: skip
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
