"""MNIST from its official idx files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from thinwire.errors import UsageError
from thinwire.tasks.base import Task
from thinwire.tasks.data_files import find_file


def mnist(data: Path | None, seed: int, /) -> Task:
    """70,000 handwritten digits, 28×28 pixels; --data names the folder of the official idx files.

    LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    return Task(
        train=TensorDataset(_read(data, "train-images-idx3-ubyte"), _read(data, "train-labels-idx1-ubyte").long()),
        test=TensorDataset(_read(data, "t10k-images-idx3-ubyte"), _read(data, "t10k-labels-idx1-ubyte").long()),
        shape=(1, 28, 28),
        classes=10,
        model="cnn",
        transform=_normalise,
        defaults={"epochs": 5, "batch_size": 64, "lr": 0.05, "optimizer": "sgd", "schedule": "cosine"},
    )


def _normalise(images: Tensor, generator: Generator | None) -> Tensor:
    return images.unsqueeze(1).float().div(255).sub(0.1307).div(0.3081)


def _read(data: Path | None, name: str) -> Tensor:
    """Read an idx file: two zero bytes, dtype 8 (unsigned byte), number of dimensions, their sizes, the values."""
    path = find_file(data, "mnist", name, f"{name}.gz", name.replace("-idx", ".idx"))
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, dtype, num_dims = struct.unpack_from(">HBB", raw)
        sizes = struct.unpack_from(f">{num_dims}I", raw, 4)
        if zero or dtype != 8:
            raise ValueError("not an idx file of unsigned bytes")
        return torch.frombuffer(bytearray(raw[4 + 4 * num_dims :]), dtype=torch.uint8).reshape(sizes)
    except (ValueError, RuntimeError, EOFError, OSError, struct.error) as error:
        raise UsageError(f"{path} is damaged or not an MNIST file ({error}); download it again") from None
