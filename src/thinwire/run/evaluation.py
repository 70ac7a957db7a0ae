"""The consolidated model on the whole test set."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.data import fetch
from thinwire.tasks.base import Task


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, comm: Comm, device: torch.device, *, batch_size: int, autocast: bool = False
) -> dict[str, float]:
    """Loss, and accuracy where that is the metric, over every test sample once, each rank taking a part of them."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct answers, samples
    numbers = torch.arange(len(task.test))  # type: ignore[arg-type]
    parts = [numbers[rank :: comm.size].split(batch_size) for rank in range(comm.size)]
    mine = [part for part in parts[comm.rank] if len(part)]
    for inputs, targets in fetch(task.test, mine):
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            outputs = model(task.transform(inputs, None))
            loss = task.loss(outputs, targets)
        correct = (outputs.argmax(-1) == targets).double().mean() if task.metric == "accuracy" else torch.zeros(())
        totals += torch.stack([loss.double().cpu(), correct.double().cpu(), torch.ones(())]) * len(targets)
    for inputs, _ in fetch(task.test, [numbers[:1]] * (len(parts[0]) - len(mine))):
        model(task.transform(inputs.to(device), None))  # all ranks run it equally often: its layers may be fetched
    loss_sum, num_correct, num_samples = comm.sum(totals).tolist()
    result = {"loss": loss_sum / num_samples}
    return result | ({"accuracy": 100 * num_correct / num_samples} if task.metric == "accuracy" else {})
