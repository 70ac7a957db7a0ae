"""A run of Ray Train, with a checkpoint after each epoch. The lines with `loop` are all that thinwire adds.

python -m examples.ray_loop "error_feedback(maxnorm(bits=4))"
python -m examples.ray_loop "diloco(every=8)" --rounds
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

from examples.tiny_gpt2 import gpt2, outcome, pieces, show
from thinwire.integrations.ray import AttachLoop, RoundsLoop


def train(config: dict[str, Any]) -> None:
    model, start = prepare_model(gpt2()), 0
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = prepare_data_loader(DataLoader(pieces(), batch_size=16, shuffle=True))  # type: ignore[arg-type]
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:  # Ray has restarted this worker
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"]
    spec = config["spec"]
    loop: Any = RoundsLoop(model, spec, optimizer) if config["rounds"] else AttachLoop(model, spec)

    losses = []
    for epoch in range(start, 2):
        batches.sampler.set_epoch(epoch)
        for batch in batches:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with loop.checkpoint_folder() as folder:  # instead of tempfile.TemporaryDirectory()
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(state, Path(folder, "state.pt"))
            metrics = outcome(losses, model.module, loop.rounds if config["rounds"] else loop.exchange)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("--rounds", action="store_true")
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        result = TorchTrainer(
            train,
            train_loop_config=vars(parser.parse_args()),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=1)
            ),
        ).fit()
    show(result.metrics)
    ray.shutdown()
