"""CIFAR-10 from its official files, binary or python."""

from __future__ import annotations

import codecs
import functools
import pickle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset

from thinwire.errors import UsageError
from thinwire.tasks.base import Task
from thinwire.tasks.data_files import find_file

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
RECORD_BYTES = 1 + 3072  # a label and 32×32 pixels of red, green and blue
NUM_TRAIN = 50_000
ORDER_SEED = 10  # of the order of which parts are taken; not the run's seed, so that all runs have the same parts


def cifar10(
    data: Path | None,
    seed: int,
    /,
    *,
    augment: bool = True,  # random crops and horizontal flips in training
    held_out: Annotated[int, Field(ge=0, lt=NUM_TRAIN)] = 0,  # training images to test on instead of the test set
    train: Annotated[int, Field(gt=0)] | None = None,  # training images to train on; default: all that are not held out
) -> Task:
    """60,000 colour images, 32×32 pixels, ten classes; --data names the folder of the official files.

    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    train_set, test_set = _read_both(data, held_out, train)

    def transform(batch: Tensor, generator: Generator | None) -> Tensor:
        mean, std = _mean_and_std(batch.device)
        normalised = (batch.float() / 255 - mean) / std
        return crop_and_flip(normalised, generator) if generator and augment else normalised

    return Task(
        train=train_set,
        test=test_set,
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


@functools.cache
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each colour, on a device; kept there, because a copy in every step would wait for the GPU."""
    mean, std = (torch.tensor(x, dtype=torch.float32, device=device)[:, None, None] for x in (MEAN, STD))
    return mean, std


def crop_and_flip(images: Tensor, generator: Generator, pad: int = 4) -> Tensor:
    """Shift each image by up to `pad` pixels, with zeros beyond its border, and mirror it with probability ½."""
    n, channels, height, width = images.shape
    device = images.device
    sample, channel, rows, columns = _positions(n, channels, height, width, device)
    shift = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=generator, device=device)
    mirror = torch.randint(0, 2, (n, 1), generator=generator, device=device)
    rows = rows + shift[0]
    columns = torch.where(mirror == 1, width - 1 - columns, columns) + shift[1]
    padded = nn.functional.pad(images, (pad, pad, pad, pad))
    if images.is_contiguous():
        return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
    by_pixel = padded.permute(0, 2, 3, 1)[sample[..., 0], rows[:, :, None], columns[:, None, :]]
    return by_pixel.permute(0, 3, 1, 2)  # in channels_last order, as the images


@functools.lru_cache(maxsize=4)
def _positions(n: int, channels: int, height: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Indices of samples, channels, rows and columns; kept, because making them takes longer than cropping."""
    sample, channel = torch.arange(n, device=device), torch.arange(channels, device=device)
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    return sample[:, None, None, None], channel[None, :, None, None], rows, columns


def _read_both(data: Path | None, held_out: int, train: int | None) -> tuple[TensorDataset, TensorDataset]:
    """What to train on and what to test on. Both are parts of one random order of the training images, if of any."""
    parts = [_read(data, f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    most = NUM_TRAIN - held_out
    if train is not None and train > most:
        raise UsageError(f"cifar10: train={train}, but {held_out} of {NUM_TRAIN} are held out; give at most {most}")
    order = torch.randperm(NUM_TRAIN, generator=Generator().manual_seed(ORDER_SEED))
    kept, tested = order[: train or most], order[most:]
    train_set = TensorDataset(images[kept], labels[kept]) if held_out or train else TensorDataset(images, labels)
    test_set = TensorDataset(images[tested], labels[tested]) if held_out else TensorDataset(*_read(data, "test_batch"))
    return train_set, test_set


def _read(data: Path | None, name: str) -> tuple[Tensor, Tensor]:
    path = find_file(data, "cifar10", f"{name}.bin", name)
    pixels, labels = _read_binary(path) if path.suffix == ".bin" else _read_pickle(path)
    if len(pixels) != 10000 or len(labels) != 10000 or labels.max() > 9:
        raise UsageError(f"{path} is damaged or not a CIFAR-10 file (10,000 images of ten classes); download it again")
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64))


def _read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    raw = np.fromfile(path, np.uint8)
    table = raw[: len(raw) // RECORD_BYTES * RECORD_BYTES].reshape(-1, RECORD_BYTES)
    return table[:, 1:].copy(), table[:, 0]


def _read_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The python files are pickles: read by an unpickler that can make arrays and nothing else."""
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"], np.uint8)
    except DAMAGED as error:
        raise UsageError(f"{path} is damaged or not a CIFAR-10 file ({error}); download it again") from None


DAMAGED = (
    pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError,
    MemoryError, LookupError, RecursionError, RuntimeError, OSError,
)  # fmt: skip


class _ArrayUnpickler(pickle.Unpickler):
    """Refuses every global except those that numpy arrays need."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module == "_codecs" and name == "encode":  # how Python 3 writes bytes in the old protocol
            return codecs.encode
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
