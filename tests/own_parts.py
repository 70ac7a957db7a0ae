"""Optimizers, metrics and streams of a user's own, by package.module:function."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tests.user_task import net
from thinwire.tasks.base import Task
from thinwire.tasks.digits import digits


def heavy(parameters: Iterable[Tensor], lr: float, *, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum)


def no_optimizer(parameters: Iterable[Tensor], lr: float) -> str:
    return f"{lr}"


def one_argument(parameters: Any) -> Any:
    return parameters


def worst(outputs: Tensor, targets: Tensor, *, factor: float = 1.0) -> Tensor:
    """A value of each sample."""
    return factor * (outputs.argmax(-1) != targets).double()


worst.higher_is_better = False  # type: ignore[attr-defined]


def share(outputs: Tensor, targets: Tensor) -> float:
    """The mean over the batch."""
    return float((outputs.argmax(-1) == targets).double().mean())


share.higher_is_better = True  # type: ignore[attr-defined]


def undecided(outputs: Tensor, targets: Tensor) -> float:
    return 0.0


def matrix(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


matrix.higher_is_better = True  # type: ignore[attr-defined]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The first digits in an order that is random in each epoch, with noise."""

    def __init__(self, data: Dataset[Any], count: int) -> None:
        self.data, self.count = data, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in torch.randperm(self.count).tolist():
            x, y = self.data[i]
            yield x + 0.1 * random.random() * torch.randn(x.shape), y


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


class NoisyDigits(Dataset[tuple[Tensor, Tensor]]):
    """An indexed dataset whose samples are augmented as they are read."""

    def __init__(self, data: Dataset[Any], count: int) -> None:
        self.data, self.count = data, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + 0.1 * random.random() * torch.randn(x.shape), y


KINDS = {"stream": Stream, "sized": SizedStream, "indexed": NoisyDigits}
STOP = {"step": -1}  # the step at which a run is stopped; −1 = never


class Stopped(Exception):
    """A run was stopped on purpose."""


def read(
    data: Path | None,
    seed: int,
    /,
    *,
    kind: str = "stream",  # stream, sized or indexed
    count: int = 330,  # samples
) -> Task:
    """Digits that are read sample by sample, with dropout in the model."""
    base = digits(data, seed)
    steps = 0

    def transform(inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        nonlocal steps
        steps += generator is not None
        if generator is not None and steps == STOP["step"]:
            STOP["step"] = -1
            raise Stopped
        return inputs

    train: Any = KINDS[kind](base.train, count)
    return Task(
        train, base.test, base.shape, base.classes, net, transform=transform,
        defaults={"steps": 30, "batch_size": 16, "lr": 0.05},
    )  # fmt: skip


def two_lengths(data: Path | None, seed: int) -> Task:
    base = digits(data, seed)
    return Task(base.train, base.test, base.shape, base.classes, net, defaults={"steps": 3, "epochs": 2})


def spelled(batch: Any, generator: torch.Generator | None) -> dict[str, Tensor]:
    """Words as tensors."""
    numbers = torch.tensor([[ord(letter) - 96.0 for letter in word] for word in batch["word"]])
    return {"letters": numbers, "first": numbers[:, 0].long() - 1}


def first_letter(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["letters"]), batch["first"])


def with_seconds(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": first_letter(model, batch), "seconds": 1.0}


def words(
    data: Path | None,
    seed: int,
    /,
    *,
    takes_seconds: bool = False,  # whether the loss returns something that every row has
) -> Task:
    """Samples without tensors, which the transform makes: 8 steps an epoch."""
    samples: Any = [{"word": a + b} for a in "abcdefgh" for b in "abcdefgh"]
    return Task(
        samples, samples[:16], (2,), 8, lambda: nn.Linear(2, 8), loss=with_seconds if takes_seconds else first_letter,
        metric="loss", transform=spelled, defaults={"epochs": 2, "batch_size": 8, "lr": 0.05},
    )  # fmt: skip
