"""Evaluation of the consolidated model on the whole test set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.common.batches import num_samples_of
from thinwire.common.dtypes import bfloat16_autocast
from thinwire.common.fetching import fetch
from thinwire.data import Batch, to_device
from thinwire.surgery.memory_format import compute_in_any_order, use_channels_last
from thinwire.tasks.base import Task


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, comm: Comm, device: torch.device, *, batch_size: int, autocast: bool = False
) -> dict[str, float]:
    """The mean loss, and the accuracy if that is the metric, over the test set. Each rank computes a part of it."""
    model.eval()
    use_channels_last(model)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct answers, samples
    indices = torch.arange(len(task.test))  # type: ignore[arg-type]
    parts = [indices[rank :: comm.size].split(batch_size) for rank in range(comm.size)]
    mine = [part for part in parts[comm.rank] if len(part)]
    one = torch.ones((), device=device)
    for fetched in fetch(task.test, mine, device=device, collate_fn=task.collate_fn):
        batch = task.transformed(to_device(fetched, device), None)
        with bfloat16_autocast(device, autocast):
            loss, correct = _loss_and_correct(model, task, batch)
        totals += torch.stack([loss.double(), correct * one, one]) * num_samples_of(batch)  # a GPU is not waited for
    for fetched in fetch(task.test, [indices[:1]] * (len(parts[0]) - len(mine)), collate_fn=task.collate_fn):
        # ranks must run it equally often: its layers may be fetched from other ranks
        _loss_and_correct(model, task, task.transformed(to_device(fetched, device), None))
    loss_sum, num_correct, num_samples = comm.sum(totals.cpu()).tolist()
    result = {"loss": loss_sum / num_samples}
    return result | ({"accuracy": 100 * num_correct / num_samples} if task.metric == "accuracy" else {})


def _loss_and_correct(model: nn.Module, task: Task, batch: Batch) -> tuple[Tensor, Tensor | int]:
    """The mean loss over a batch, and the share of correct answers if that is the metric."""
    inputs = task.batch_loss.inputs(batch)

    def run() -> Any:
        return task.batch_loss.run(model, inputs)

    result = compute_in_any_order(model, run)
    if task.batch_loss.kind != "output":
        return task.batch_loss.value(result).total, 0
    targets = batch[1]
    loss = task.batch_loss.of_output(result, targets).total
    return loss, (result.argmax(-1) == targets).double().mean() if task.metric == "accuracy" else 0
