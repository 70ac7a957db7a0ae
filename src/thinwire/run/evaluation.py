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
from thinwire.tasks.metrics import Metric, as_metric


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, comm: Comm, device: torch.device, *, batch_size: int, autocast: bool = False,
    num_workers: int = 0,
) -> dict[str, float]:  # fmt: skip
    """The mean loss, and the metric if that is another one, over the test set. Each rank computes a part of it."""
    model.eval()
    use_channels_last(model)
    metric = as_metric(task.metric)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, metric, samples
    indices = torch.arange(len(task.test))  # type: ignore[arg-type]
    parts = [indices[rank :: comm.size].split(batch_size) for rank in range(comm.size)]
    mine = [part for part in parts[comm.rank] if len(part)]
    one = torch.ones((), dtype=torch.float64, device=device)
    for fetched in fetch(task.test, mine, num_workers, range(len(mine)), device, task.collate_fn):
        batch = task.transformed(to_device(fetched, device), None)
        with bfloat16_autocast(device, autocast):
            loss, measured = _measure(model, task, metric, batch)
        totals += torch.stack([loss.double(), measured.to(device), one]) * num_samples_of(batch)  # no wait for a GPU
    padding = [indices[:1]] * (len(parts[0]) - len(mine))
    for fetched in fetch(task.test, padding, seeds=range(len(padding)), collate_fn=task.collate_fn):
        # ranks must run it equally often: its layers may be fetched from other ranks
        _measure(model, task, metric, task.transformed(to_device(fetched, device), None))
    loss_sum, metric_sum, num_samples = comm.sum(totals.cpu()).tolist()
    results = {"loss": loss_sum / num_samples}
    return results if metric.function is None else {**results, metric.name: metric.unit * metric_sum / num_samples}


def _measure(model: nn.Module, task: Task, metric: Metric, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean loss and the mean of the metric over a batch."""
    loss, inputs = task.batch_loss, task.batch_loss.inputs(batch)

    def run() -> Any:
        return loss.run(model, inputs)

    result = compute_in_any_order(model, run)
    targets = batch[1] if loss.kind == "output" else None
    total = loss.of_output(result, targets).total if loss.kind == "output" else loss.value(result).total
    first, second = (result, targets) if metric.takes_outputs else (model, batch)
    return total, metric.mean(first, second, num_samples_of(batch))
