"""Handwritten digits, 8×8 pixels: real data that comes with scikit-learn, without a download."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from thinwire.errors import UsageError
from thinwire.tasks.base import Task

NUM_TEST = 360
SPLIT_SEED = 1797  # the same split in every run, whatever its seed


def digits(data: Path | None, seed: int, /) -> Task:
    """1,797 real handwritten digits, 8×8 pixels, ten classes; needs no files.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
    """
    table = torch.from_numpy(_read_table())
    images = table[:, :64].float().div(16).sub(0.5).reshape(-1, 1, 8, 8)
    labels = table[:, 64].long()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return Task(
        train=TensorDataset(images[train], labels[train]),
        test=TensorDataset(images[test], labels[test]),
        shape=(1, 8, 8),
        classes=10,
        model="mlp",
        defaults={"epochs": 20, "batch_size": 16, "lr": 0.1, "optimizer": "sgd", "schedule": "cosine"},
    )


def _read_table() -> np.ndarray:
    """One row per image, 64 pixels and the label, from scikit-learn's file; importing scikit-learn takes seconds."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise UsageError("digits needs scikit-learn for its data; pip install scikit-learn")
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz") as file:
        table: np.ndarray = np.loadtxt(file, delimiter=",")
    return table
