"""CIFAR-10 from its official files, binary or python."""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from thinwire.errors import UsageError
from thinwire.tasks.base import Task, crop_and_flip, find_file

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
RECORD_BYTES = 1 + 3072  # a label and 32×32 pixels of red, green and blue


def cifar10(
    data: Path | None,
    seed: int,
    /,
    *,
    augment: bool = True,  # random crops and flips in training
) -> Task:
    """60,000 colour images, 32×32 pixels, ten classes; --data names the folder of the official files.

    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    parts = [_read(data, f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def transform(batch: Tensor, generator: Generator | None) -> Tensor:
        mean, std = (batch.new_tensor(x, dtype=torch.float32)[:, None, None] for x in (MEAN, STD))
        normalised = (batch.float() / 255 - mean) / std
        return crop_and_flip(normalised, generator) if generator and augment else normalised

    return Task(
        train=TensorDataset(images, labels),
        test=TensorDataset(*_read(data, "test_batch")),
        shape=(3, 32, 32),
        classes=10,
        model="resnet18",
        transform=transform,
        defaults={
            "epochs": 10,
            "batch_size": 128,
            "lr": 0.1,
            "optimizer": "sgd(nesterov=True, weight_decay=0.0005)",
            "schedule": "cosine(warmup_epochs=1)",
        },
    )


def _read(data: Path | None, name: str) -> tuple[Tensor, Tensor]:
    path = find_file(data, "cifar10", f"{name}.bin", name)
    pixels, labels = _binary(path) if path.suffix == ".bin" else _python(path)
    if len(pixels) != 10000 or len(labels) != 10000 or labels.max() > 9:
        raise UsageError(f"{path} is damaged or not CIFAR-10's (10,000 images of ten classes); fetch it again")
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64))


def _binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    raw = np.fromfile(path, np.uint8)
    table = raw[: len(raw) // RECORD_BYTES * RECORD_BYTES].reshape(-1, RECORD_BYTES)
    return table[:, 1:].copy(), table[:, 0]


def _python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The python batches are pickles: read with an unpickler that can make arrays and nothing else."""
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"], np.uint8)
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged or not CIFAR-10's ({error}); fetch it again") from None


class _ArraysOnly(pickle.Unpickler):
    """Refuses every global but the ones that numpy arrays are made with."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module == "_codecs" and name == "encode":  # how Python 3 writes bytes in the old protocol
            return codecs.encode
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
