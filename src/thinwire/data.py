"""Which samples a rank reads, in which order: a pure function of (seed, epoch, batch), so a position is all to save."""

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


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Inputs and targets on a device; anything but two tensors is refused."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
        parts = [type(part).__name__ for part in batch] if isinstance(batch, tuple | list) else []
        what = f"{type(batch).__name__}" + (f" of {', '.join(parts)}" if parts else "")
        raise UsageError(f"a batch that is a {what}; give (inputs, targets), two tensors: trainer.step((x, y))")
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


class Loader:
    """The batches of one rank, epoch after epoch.

    Epoch e shuffles all samples with (seed, e), the same on every rank. A step takes the next ranks·batch_size
    of them, and each shard its share; `ranks` is the number of shards unless several ranks read the same one. The
    last, smaller batch is cut so that every rank gets the same number of samples, and left out if that would be a
    single one (BatchNorm needs two). So the batches depend on the number of ranks, and not on that of shards.

    `epoch` is the number of epochs that are over, `batch` the number of batches given out in the present one.
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
    ) -> None:
        if not isinstance(shard, Shard):
            raise UsageError(
                f"shard is {type(shard).__name__}; give trainer.shard, of the trainer that takes the batches"
            )
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}; possible: 1 or more")
        self.dataset = dataset
        self.shard = shard
        self.ranks = ranks or shard.count
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.epoch = 0
        self.batch = 0
        self._begun = False  # iterating now would leave the present epoch for the next one
        self.num_samples = num_samples(dataset, "the dataset")
        if self.num_samples < self.ranks:
            raise UsageError(
                f"{self.num_samples} samples cannot be shared by {self.ranks} ranks; "
                f"use at most {self.num_samples} ranks or more data"
            )

    def __len__(self) -> int:
        """Batches per epoch."""
        full, tail = self._sizes()
        return full + (tail > 0)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch; after `load_state_dict`, what is left of the one that was saved."""
        if self._begun:
            self.end_epoch()
        self._begun = True
        return self._counted(self.epoch)

    def _counted(self, epoch: int) -> Iterator[Any]:
        for number, batch in enumerate(self.batches(epoch, self.batch), self.batch + 1):
            if self.epoch == epoch:
                self.batch = number
            yield batch
        if self.epoch == epoch:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Leave the present epoch for the next one; to be called where a loop over its batches was left early."""
        self.epoch, self.batch, self._begun = self.epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: save it with the trainer's state."""
        return {**self._identity(), "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch that was given out last; refused if the state is of other data."""
        for what, here in self._identity().items():
            if state.get(what) != here:
                raise UsageError(
                    f"the loader's state has {what} {state.get(what)}, this loader has {here}; make it as it was made"
                )
        self.epoch, self.batch, self._begun = state["epoch"], state["batch"], False

    def _identity(self) -> dict[str, Any]:
        shard = f"{self.shard.index} of {self.shard.count}"
        return {
            "samples": self.num_samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shard": shard,
            "ranks": self.ranks,
        }

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch, from batch `start` on."""
        seed = derive_seed(self.seed, epoch, self.shard.index)
        return fetch(self.dataset, self.indices(epoch)[start:], self.num_workers, seed)

    def indices(self, epoch: int) -> list[Tensor]:
        """The sample numbers of each batch of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        full, tail = self._sizes()
        sizes = [self.batch_size * self.ranks] * full + [tail * self.ranks] * (tail > 0)
        return [part[self.shard.index :: self.shard.count] for part in order[: sum(sizes)].split(sizes)]

    def _sizes(self) -> tuple[int, int]:
        """Full batches in an epoch, and samples per rank in the last, smaller one."""
        full, rest = divmod(self.num_samples, self.batch_size * self.ranks)
        tail = rest // self.ranks
        return full, 0 if tail == 1 and full else tail


def loader(dataset: Dataset[Any], shard: Shard, batch_size: int, *, seed: int = 0, num_workers: int = 0) -> Loader:
    """The batches that a rank should train on; iterate once per epoch.

    `batch_size` is per shard: per rank, or, where several ranks read the same samples, for those together. Any
    map-style dataset will do; a TensorDataset is indexed whole batches at a time. The loader's `state_dict` is the
    position in the data.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    >>> [len(targets) for inputs, targets in loader(data, Shard(0, 2), batch_size=2)]
    [2, 2]
    """
    return Loader(dataset, shard, batch_size, seed=seed, num_workers=num_workers)


def num_samples(dataset: Any, what: str) -> int:
    """How many samples there are to be read by number; UsageError for a stream, which has none."""
    if isinstance(dataset, DataLoader):
        raise UsageError(f"{what} is a DataLoader; give the dataset in it: loader.dataset")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{what} is {type(dataset).__name__}, a stream or without a length; ranks share samples out by number, so "
            "give a map-style Dataset. A loop of your own takes streams, a part for each rank: "
            "for batch in tw.epoch(trainer, DataLoader(stream, batch_size=32), comm)"
        )
    return len(dataset)


def fetch(dataset: Dataset[Any], batches: Sequence[Tensor], num_workers: int = 0, seed: int = 0) -> Iterator[Any]:
    """The samples with the given numbers, batch by batch; from a TensorDataset, whole batches at a time.

    `seed` is that of worker processes. Without one, torch would draw it from the random numbers of the training.
    """
    if isinstance(dataset, TensorDataset):
        return (dataset[numbers] for numbers in batches)
    order = [numbers.tolist() for numbers in batches]
    generator = torch.Generator().manual_seed(seed)
    return iter(DataLoader(dataset, batch_sampler=order, num_workers=num_workers, generator=generator))


def derive_seed(*numbers: int) -> int:
    """One well-spread 63-bit seed from several small numbers (the splitmix64 finaliser, once per number).

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
