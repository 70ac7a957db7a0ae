"""Which samples a rank reads, and in which order: a pure function of (seed, epoch, batch).

So a checkpoint needs only the position in the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from thinwire.common.batches import describe, map_tensors
from thinwire.common.fetching import fetch, on_device
from thinwire.errors import UsageError

Batch = Any  # (inputs, targets), or tensors in another structure; see thinwire.losses


@dataclass(frozen=True)
class Shard:
    """The part of the data that a rank reads: part `index` of `count` equal parts of every batch."""

    index: int
    count: int


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to a device; an object with a method `to` moves itself."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch.to(device)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def two_tensors(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets on a device; raise UsageError unless the batch is two tensors."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
        raise UsageError(
            f"a batch that is {describe(batch)}; give (inputs, targets), two tensors: trainer.step((x, y))"
        )
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


class Loader:
    """The batches of one rank, epoch after epoch.

    Epoch e shuffles all samples with (seed, e), the same on every rank. A step takes the next ranks·batch_size
    samples, and splits them equally among the shards; `ranks` is the number of shards unless several ranks read the
    same one. The last, smaller batch is cut so that every rank gets the same number of samples, and left out if that
    number is one (BatchNorm needs two). So the batches depend on the number of ranks, and not on that of shards.

    `epoch` counts the finished epochs, `batch` the batches that were returned in the current one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        shard: Shard,
        batch_size: int,
        *,
        seed: int = 0,
        num_workers: int = 0,
        ranks: int | None = None,
        device: torch.device | str | None = None,
        collate_fn: Callable[[list[Any]], Batch] = default_collate,
    ) -> None:
        if not isinstance(shard, Shard):
            raise UsageError(
                f"shard is {type(shard).__name__}; give trainer.shard, of the trainer that takes the batches"
            )
        if batch_size < 1 or batch_size != int(batch_size):
            raise UsageError(f"batch_size={batch_size}; possible: whole numbers, 1 or more")
        self.device = None if device is None else torch.device(device)
        self.dataset = on_device(dataset, self.device, collate_fn)
        self.shard = self._first_shard = shard
        self.ranks = ranks or shard.count
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.epoch = 0
        self.batch = 0
        self._has_begun = False  # whether the current epoch was iterated, so that iterating again begins the next one
        self.num_samples = self.count_samples(dataset)
        if 0 <= self.num_samples < self.ranks:
            raise UsageError(
                f"{self.num_samples} samples cannot be shared by {self.ranks} ranks; "
                f"use at most {self.num_samples} ranks or more data"
            )

    def count_samples(self, dataset: Dataset[Any]) -> int:
        """The number of samples of an epoch."""
        return num_samples(dataset, "the dataset")

    def follow(self, shard: Shard) -> None:
        """Read another shard of the same batches from now on: that of the next part of a sequence."""
        if self.batch_size * self.ranks % shard.count:
            raise UsageError(
                f"batches of {self.batch_size * self.ranks} samples cannot be split into {shard.count} equal shards, "
                f"as the next part of the sequence needs; give a batch_size that is a multiple of {shard.count}"
            )
        self.shard = shard

    def __len__(self) -> int:
        """Batches per epoch."""
        full, tail = self.sizes()
        return full + (tail > 0)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch; after `load_state_dict`, the rest of the saved epoch."""
        if self._has_begun:
            self.end_epoch()
        self._has_begun = True
        return self._count_batches(self.epoch)

    def _count_batches(self, epoch: int) -> Iterator[Any]:
        for number, batch in enumerate(self.batches(epoch, self.batch), self.batch + 1):
            if self.epoch == epoch:
                self.batch = number
            yield batch
        if self.epoch == epoch:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Go to the next epoch; to be called when a loop over the batches was left early."""
        self.epoch, self.batch, self._has_begun = self.epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position in the data; save it with the trainer's state."""
        return {**self._identity(), "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch of the saved state; raise UsageError if the state is of another loader."""
        for what, here in self._identity().items():
            if state.get(what) != here:
                raise UsageError(
                    f"the loader's state has {what} {state.get(what)}, this loader has {here}; use the same arguments, "
                    "and make the loader before the trainer's state is loaded"
                )
        self.epoch, self.batch, self._has_begun = state["epoch"], state["batch"], False

    def _identity(self) -> dict[str, Any]:
        shard = f"{self._first_shard.index} of {self._first_shard.count}"
        return {
            "samples": self.num_samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shard": shard,
            "ranks": self.ranks,
        }

    def batches(self, epoch: int, start: int = 0) -> Generator[Any, None, None]:
        """The batches of an epoch, beginning with batch `start`."""
        indices = self.indices(epoch)
        seeds = [derive_seed(self.seed, epoch, batch, self.shard.index) for batch in range(start, len(indices))]
        return fetch(self.dataset, indices[start:], self.num_workers, seeds, self.device, self.collate_fn)

    def indices(self, epoch: int) -> list[Tensor]:
        """The indices of the samples in each batch of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        full, tail = self.sizes()
        sizes = [self.batch_size * self.ranks] * full + [tail] * (tail > 0)
        return [part[self.shard.index :: self.shard.count] for part in order[: sum(sizes)].split(sizes)]

    def sizes(self) -> tuple[int, int]:
        """The number of full batches in an epoch, and of samples in the last, smaller one."""
        full, rest = divmod(self.num_samples, self.batch_size * self.ranks)
        unit = math.lcm(self.ranks, self.shard.count)  # so that ranks, and shards, get equally many
        return full, 0 if rest // unit == 1 and full else rest // unit * unit


def num_samples(dataset: Any, what: str) -> int:
    """The length of a map-style dataset; raise UsageError for a stream or a DataLoader."""
    if isinstance(dataset, DataLoader):
        raise UsageError(f"{what} is a DataLoader; give the dataset in it: loader.dataset")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{what} is {type(dataset).__name__}, a stream or without a length; ranks choose samples by index, so give "
            "a map-style Dataset"
        )
    return len(dataset)


def derive_seed(*numbers: int) -> int:
    """One 63-bit seed from several small numbers, by the finalizer of splitmix64, once per number.

    >>> derive_seed(0, 1) != derive_seed(1, 0)
    True
    """
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        value ^= value >> 31
    return value >> 1
