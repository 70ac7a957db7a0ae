"""Which samples a rank reads, in which order. Pure functions of (seed, epoch), so resuming needs no state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from thinwire.errors import UsageError

Batch = tuple[Tensor, Tensor]  # inputs, targets


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts of every batch."""

    index: int
    count: int


class Loader:
    """The batches of one rank, epoch after epoch.

    Epoch e shuffles all samples with (seed, e), the same on every rank. A step takes the next count·batch_size
    of them, and each shard its share. The last, smaller batch is cut so that every shard gets the same number
    of samples, and left out if that would be a single one (BatchNorm needs two).
    """

    def __init__(
        self, dataset: Dataset[Any], shard: Shard, batch_size: int, *, seed: int = 0, num_workers: int = 0
    ) -> None:
        if not isinstance(shard, Shard):
            raise UsageError(
                f"shard is {type(shard).__name__}; give trainer.shard, of the trainer that takes the batches"
            )
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}; possible: 1 or more")
        self.dataset = dataset
        self.shard = shard
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.epoch = 0
        self.num_samples = num_samples(dataset, "the dataset")
        if self.num_samples < shard.count:
            raise UsageError(
                f"{self.num_samples} samples cannot be shared by {shard.count} ranks; "
                f"use at most {self.num_samples} ranks or more data"
            )

    def __len__(self) -> int:
        """Batches per epoch."""
        full, tail = self._sizes()
        return full + (tail > 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.batches(epoch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch, from batch `start` on."""
        return fetch(self.dataset, self.indices(epoch)[start:], self.num_workers)

    def indices(self, epoch: int) -> list[Tensor]:
        """The sample numbers of each batch of an epoch."""
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        full, tail = self._sizes()
        sizes = [self.batch_size * self.shard.count] * full + [tail * self.shard.count] * (tail > 0)
        return [part[self.shard.index :: self.shard.count] for part in order[: sum(sizes)].split(sizes)]

    def _sizes(self) -> tuple[int, int]:
        """Full batches in an epoch, and samples per shard in the last, smaller one."""
        full, rest = divmod(self.num_samples, self.batch_size * self.shard.count)
        tail = rest // self.shard.count
        return full, 0 if tail == 1 and full else tail


def loader(dataset: Dataset[Any], shard: Shard, batch_size: int, *, seed: int = 0, num_workers: int = 0) -> Loader:
    """The batches that a rank should train on; iterate once per epoch.

    `batch_size` is per rank. Any map-style dataset will do; a TensorDataset is indexed whole batches at a time.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    >>> [len(targets) for inputs, targets in loader(data, Shard(0, 2), batch_size=2)]
    [2, 2]
    """
    return Loader(dataset, shard, batch_size, seed=seed, num_workers=num_workers)


def check_batch(batch: Any) -> None:
    """Raise UsageError unless a batch is inputs and targets."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return
    what = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
    raise UsageError(
        f"a batch is (inputs, targets), two tensors, and this is {what}; give trainer.step((inputs, targets)). Several "
        "inputs go into one tensor, which the model takes apart"
    )


def num_samples(dataset: Any, what: str) -> int:
    """How many samples there are to be read by number; UsageError for a stream, which has none."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{what} is {type(dataset).__name__}, a stream or without a length; ranks share samples out by number, so "
            "give a map-style Dataset. A loop of your own takes streams, a part for each rank: "
            "for batch in tw.epoch(trainer, DataLoader(stream, batch_size=32), comm)"
        )
    return len(dataset)


def fetch(dataset: Dataset[Any], batches: Sequence[Tensor], num_workers: int = 0) -> Iterator[Any]:
    """The samples with the given numbers, batch by batch; from a TensorDataset, whole batches at a time."""
    if isinstance(dataset, TensorDataset):
        return (dataset[numbers] for numbers in batches)
    order = [numbers.tolist() for numbers in batches]
    return iter(DataLoader(dataset, batch_sampler=order, num_workers=num_workers))


def mix(*numbers: int) -> int:
    """One well-spread 63-bit seed from several small numbers (the splitmix64 finaliser, once per number).

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        value ^= value >> 31
    return value >> 1
