"""Evaluation of the consolidated model on the whole test set."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.common.dtypes import bfloat16_autocast
from thinwire.common.fetching import fetch
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
    for inputs, targets in fetch(task.test, mine, device=device):
        inputs, targets = inputs.to(device), targets.to(device)
        with bfloat16_autocast(device, autocast):
            outputs = compute_in_any_order(model, task.transform(inputs, None))
            loss = task.loss(outputs, targets)
        correct = (outputs.argmax(-1) == targets).double().mean() if task.metric == "accuracy" else 0 * one
        totals += torch.stack([loss.double(), correct.double(), one]) * len(targets)  # a GPU is not waited for
    for inputs, _ in fetch(task.test, [indices[:1]] * (len(parts[0]) - len(mine))):
        # ranks must run it equally often: its layers may be fetched from other ranks
        compute_in_any_order(model, task.transform(inputs.to(device), None))
    loss_sum, num_correct, num_samples = comm.sum(totals.cpu()).tolist()
    result = {"loss": loss_sum / num_samples}
    return result | ({"accuracy": 100 * num_correct / num_samples} if task.metric == "accuracy" else {})
