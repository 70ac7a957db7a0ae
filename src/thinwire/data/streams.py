"""tw.loader: the batches that a rank trains on, of a dataset with an index or of a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from itertools import count as count_from
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from thinwire.common.fetching import loader_options
from thinwire.common.prefetching import copied_to_gpu
from thinwire.common.seeding import OwnRandomness
from thinwire.data.shards import Batch, Loader, Shard, derive_seed
from thinwire.errors import UsageError


def loader(
    dataset: Dataset[Any],
    shard: Shard,
    batch_size: int,
    *,
    seed: int = 0,
    num_workers: int = 0,
    ranks: int | None = None,
    device: torch.device | str | None = None,
    collate_fn: Callable[[list[Any]], Batch] = default_collate,
) -> Loader:
    """The batches that a rank should train on; iterate once per epoch.

    `batch_size` is per shard: per rank, or per group of ranks that read the same samples; with `ranks` it is per rank
    always. Any dataset will do; a TensorDataset is indexed whole batches at a time. A stream (IterableDataset) must
    give every rank the same samples in the same order: each takes its part of them. `collate_fn` makes a batch of a
    list of samples, as a DataLoader's does. The loader's `state_dict` is the position in the data.

    Random numbers that reading and `collate_fn` draw follow from the seed and the batch (those of a stream itself, from
    the seed and the epoch), with any `num_workers`, so that a state in mid-epoch goes on exactly.

    `device` names the model's GPU: then batches are there when they are asked for. A TensorDataset is copied to the GPU
    whole if it takes at most a tenth of the memory that is free. Others are read ahead if another thread or process can
    do it: a larger TensorDataset on a thread, any dataset with `num_workers`. The batches are the same.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    >>> [len(targets) for inputs, targets in loader(data, Shard(0, 2), batch_size=2)]
    [2, 2]
    """
    kind = StreamLoader if isinstance(dataset, IterableDataset) else Loader
    return kind(
        dataset, shard, batch_size, seed=seed, num_workers=num_workers, ranks=ranks, device=device,
        collate_fn=collate_fn,
    )  # fmt: skip


class StreamLoader(Loader):
    """The batches of one rank from a stream, epoch after epoch.

    A step takes the next ranks·batch_size samples of the stream; sample i of them belongs to shard i mod count. So the
    batches depend on the number of ranks, and not on that of shards, as those of a Loader do. Every rank reads the
    whole stream, and keeps its part. To go on in mid-epoch, it reads what was read before, and drops it.

    If the stream has a `set_epoch`, that is called before each epoch. Its `__len__`, if it has one, is the most that an
    epoch takes.
    """

    def count_samples(self, dataset: Dataset[Any]) -> int:
        """The stated number of samples, or −1."""
        try:
            return len(dataset)  # type: ignore[arg-type]
        except TypeError:
            return -1

    def __len__(self) -> int:
        if self.num_samples < 0:
            raise TypeError("a stream without a length")
        return super().__len__()

    def indices(self, epoch: int) -> list[torch.Tensor]:
        raise UsageError("the samples of a stream have no indices; iterate over the loader")

    def batches(self, epoch: int, start: int = 0) -> Generator[Any, None, None]:
        """The batches of an epoch, beginning with batch `start`. One worker process reads them, if there are any."""
        part = _StreamPart(self, epoch, start)
        read: Iterator[Any] = iter(part)
        if self.num_workers:
            read = iter(DataLoader(part, **loader_options(1)))
        if self.device is not None and self.device.type == "cuda":
            read = copied_to_gpu(read, self.device, in_background=self.num_workers > 0)
        yield from read if self.num_samples < 0 else islice(read, max(0, len(self) - start))


class _StreamPart(IterableDataset[Any]):
    """One shard's batches of a stream, in one epoch."""

    def __init__(self, loader: StreamLoader, epoch: int, start: int) -> None:
        self.dataset, self.shard, self.epoch, self.start = loader.dataset, loader.shard, epoch, start
        self.size, self.unit = loader.batch_size * loader.ranks, math.lcm(loader.ranks, loader.shard.count)
        self.collate_fn = loader.collate_fn
        self.seed = loader.seed

    def __iter__(self) -> Iterator[Any]:
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self.epoch)
        randomness = OwnRandomness(
            derive_seed(self.seed, self.epoch)
        )  # the same on all ranks: they must read the same stream
        with randomness.used():
            samples = iter(self.dataset)
            for _ in islice(samples, self.start * self.size):
                pass  # what was read before
        for number in count_from(self.start):
            with randomness.used():
                own, count = self._take(samples)
            if count < self.size:
                rest = 0 if count // self.unit == 1 and number else count // self.unit * self.unit
                own = own[: rest // self.shard.count]
            if own:
                yield self._collated(own, number)
            if count < self.size:
                return

    def _collated(self, own: list[Any], number: int) -> Any:
        """Samples as a batch; random numbers that this draws depend on the batch and the shard, as in a Loader."""
        with OwnRandomness(derive_seed(self.seed, self.epoch, number, self.shard.index)).used():
            return self.collate_fn(own)

    def _take(self, samples: Iterator[Any]) -> tuple[list[Any], int]:
        """This shard's samples of the next step, and how many all shards have."""
        own, count = [], 0
        for sample in islice(samples, self.size):
            if count % self.shard.count == self.shard.index:
                own.append(sample)
            count += 1
        return own, count
