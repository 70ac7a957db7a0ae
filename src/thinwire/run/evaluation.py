"""Evaluation of the consolidated model on the whole test set."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.common.dtypes import bfloat16_autocast
from thinwire.common.fetching import fetch
from thinwire.surgery.memory_format import compute_in_any_order, use_channels_last
from thinwire.tasks.base import Task
from thinwire.tasks.metrics import as_metric


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, comm: Comm, device: torch.device, *, batch_size: int, autocast: bool = False,
    num_workers: int = 0,
) -> dict[str, float]:  # fmt: skip
    """The mean loss, and the metric if that is another, over the test set. Each rank computes a part of it."""
    metric = as_metric(task.metric)
    model.eval()
    use_channels_last(model)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, metric, samples
    indices = torch.arange(len(task.test))  # type: ignore[arg-type]
    parts = [indices[rank :: comm.size].split(batch_size) for rank in range(comm.size)]
    mine = [part for part in parts[comm.rank] if len(part)]
    one = torch.ones((), dtype=torch.float64, device=device)
    for inputs, targets in fetch(task.test, mine, num_workers, range(len(mine)), device):
        inputs, targets = inputs.to(device), targets.to(device)
        with bfloat16_autocast(device, autocast):
            outputs = compute_in_any_order(model, task.transform(inputs, None))
            loss = task.loss(outputs, targets)
        measured = metric.mean(outputs, targets).to(device)
        totals += torch.stack([loss.double(), measured, one]) * len(targets)  # a GPU is not waited for
    padding = [indices[:1]] * (len(parts[0]) - len(mine))
    for inputs, _ in fetch(task.test, padding, seeds=range(len(padding))):
        # ranks must run it equally often: its layers may be fetched from other ranks
        compute_in_any_order(model, task.transform(inputs.to(device), None))
    loss_sum, metric_sum, num_samples = comm.sum(totals.cpu()).tolist()
    results = {"loss": loss_sum / num_samples}
    return results if metric.function is None else {**results, metric.name: metric.unit * metric_sum / num_samples}
