"""The task of benchmarks/faults.py: digits with everything random that training can have, and time to fail in."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from thinwire.tasks.base import Task
from thinwire.tasks.digits import digits

WIDTH = 48


def net() -> nn.Module:
    """Three hidden layers with BatchNorm and dropout."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (64, WIDTH, WIDTH):
        layers += [nn.Linear(inputs, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def noisy(data: Path | None, seed: int, /, *, pause: float = 0.02) -> Task:
    """Digits with random noise on the inputs. A step takes at least `pause` seconds, without using the processor."""
    base = digits(data, seed)

    def transform(inputs: Tensor, generator: Generator | None) -> Tensor:
        if generator is None:
            return inputs
        time.sleep(pause)
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)

    defaults = {"epochs": 3, "batch_size": 32, "lr": 0.05}
    return Task(base.train, base.test, base.shape, base.classes, net, transform=transform, defaults=defaults)
