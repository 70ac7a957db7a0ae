"""Random inputs, labelled by a random teacher network. Of any size, for measuring speed and bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import PositiveInt
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.data import derive_seed
from thinwire.tasks.base import Task


def synthetic(
    data: Path | None,
    seed: int,
    /,
    *,
    features: PositiveInt = 64,  # inputs of the network that labels and of the model
    classes: PositiveInt = 10,  # number of classes
    width: PositiveInt = 256,  # hidden units per layer of the model; more = more bytes per step
    depth: PositiveInt = 2,  # hidden layers of the model
    samples: PositiveInt = 4096,  # training samples
) -> Task:
    """Random inputs labelled by a random two-layer network, of any size; needs no files."""
    generator = torch.Generator().manual_seed(derive_seed(seed, features, classes))
    teacher = [
        torch.randn(features, 2 * features, generator=generator) / features**0.5,
        torch.randn(2 * features, classes, generator=generator),
    ]
    inputs = torch.randn(samples + samples // 4 + 1, features, generator=generator)
    scores = torch.relu(inputs @ teacher[0]) @ teacher[1]
    labels = (scores - scores.mean(0)).argmax(1)  # centred, so that all classes are frequent
    return Task(
        train=TensorDataset(inputs[:samples], labels[:samples]),
        test=TensorDataset(inputs[samples:], labels[samples:]),
        shape=(features,),
        classes=classes,
        model=f"mlp(width={width}, depth={depth})",
        loss=nn.functional.cross_entropy,
        defaults={"epochs": 10, "batch_size": 32, "lr": 0.05, "optimizer": "sgd", "schedule": "cosine"},
    )
