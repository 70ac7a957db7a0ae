"""A task of your own: thinwire train --task "examples.own_task:spirals(turns=1.5)" --ranks 2 --epochs 10"""

from pathlib import Path

import torch
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
