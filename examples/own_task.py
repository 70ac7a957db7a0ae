"""A task of your own: thinwire train --task "examples.own_task:spirals(turns=1.5)" --ranks 2 --epochs 10

Also an optimizer and a metric: --optimizer "examples.own_task:two_speeds(bias=0.1)" --metric examples.own_task:margin
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import thinwire as tw


def spirals(
    data: Path | None,  # what --data names; not needed here
    seed: int,
    /,
    *,
    turns: float = 1.0,  # more = harder
) -> tw.Task:
    """Two spirals, to be told apart."""
    generator = torch.Generator().manual_seed(seed)
    distance = torch.rand(2000, generator=generator).sqrt()
    label = torch.randint(0, 2, (2000,), generator=generator)
    angle = 2 * torch.pi * turns * distance + torch.pi * label
    points = distance[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return tw.Task(
        train=TensorDataset(points[:1600], label[:1600]),
        test=TensorDataset(points[1600:], label[1600:]),
        shape=(2,),
        classes=2,
        model="mlp(width=64, depth=3)",
        defaults={"epochs": 30, "batch_size": 16, "lr": 0.05},
    )


def two_speeds(
    parameters: list[Tensor],
    lr: float,
    /,
    *,
    bias: float = 1.0,  # the learning rate of vectors, as a share of that of matrices
) -> torch.optim.Optimizer:
    """SGD in which vectors have another learning rate than matrices."""
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    return torch.optim.SGD([{"params": matrices}, {"params": vectors, "lr": bias * lr}], lr, 0.9)


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """How much more the right class gets than the wrong one: a value of each sample."""
    right = outputs.gather(1, targets[:, None])[:, 0]
    return right - (outputs.sum(1) - right)


margin.higher_is_better = True
