"""MNIST from its official idx files."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from thinwire.errors import UsageError
from thinwire.tasks.base import Task
from thinwire.tasks.data_files import find_file

MOST_BYTES = 2**26  # of an unpacked file; the largest of the official ones has 47 MB


def mnist(data: Path | None, seed: int, /) -> Task:
    """70,000 handwritten digits, 28×28 pixels; --data names the folder of the official idx files.

    LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    return Task(
        train=_read_both(data, "train"),
        test=_read_both(data, "t10k"),
        shape=(1, 28, 28),
        classes=10,
        model="cnn",
        transform=_normalise,
        defaults={"epochs": 5, "batch_size": 64, "lr": 0.05, "optimizer": "sgd", "schedule": "cosine"},
    )


def _normalise(images: Tensor, generator: Generator | None) -> Tensor:
    return images.unsqueeze(1).float().div(255).sub(0.1307).div(0.3081)


def _read_both(data: Path | None, part: str) -> TensorDataset:
    """Images and their labels."""
    images, labels = _read(data, f"{part}-images-idx3-ubyte"), _read(data, f"{part}-labels-idx1-ubyte")
    count = len(images) if images.dim() else 0
    if count < 1 or images.shape[1:] != (28, 28) or labels.shape != (count,) or labels.max() > 9:
        raise UsageError(
            f"{data}: MNIST's {part} files have images of shape {tuple(images.shape)} and labels of shape "
            f"{tuple(labels.shape)}; expected (n, 28, 28) and (n,), with labels from 0 to 9. Download them again"
        )
    return TensorDataset(images, labels.long())


def _read(data: Path | None, name: str) -> Tensor:
    """Read an idx file: two zero bytes, dtype 8 (unsigned byte), number of dimensions, their sizes, the values."""
    path = find_file(data, "mnist", name, f"{name}.gz", name.replace("-idx", ".idx"))
    try:
        raw = _unzipped(path) if path.suffix == ".gz" else path.read_bytes()
        zero, dtype, num_dims = struct.unpack_from(">HBB", raw)
        sizes = struct.unpack_from(f">{num_dims}I", raw, 4)
        if zero or dtype != 8:
            raise ValueError("not an idx file of unsigned bytes")
        return torch.frombuffer(bytearray(raw[4 + 4 * num_dims :]), dtype=torch.uint8).reshape(sizes)
    except (ValueError, RuntimeError, EOFError, OSError, struct.error, zlib.error) as error:
        raise UsageError(f"{path} is damaged or not an MNIST file ({error}); download it again") from None


def _unzipped(path: Path) -> bytes:
    with gzip.open(path) as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"it unpacks to more than {MOST_BYTES} bytes")
    return raw
