"""Streams have the batches of an indexed dataset, on any number of shards; workers and resuming change nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import thinwire as tw
from thinwire.comm.base import Comm
from thinwire.data import Loader, Shard, StreamLoader


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """The numbers up to `count`, each with a random one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.count):
            yield torch.tensor([float(number), self.epoch]), torch.rand(1) + random.random() + float(np.random.rand())


class Sized(Numbers):
    def __len__(self) -> int:
        return self.count


def read(loader: Loader, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [inputs[:, 0].int().tolist() for inputs, _ in loader.batches(epoch, start)]


@given(st.integers(12, 120), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5))
def test_a_stream_has_the_batches_of_an_indexed_dataset_in_its_order(count: int, shards: int, batch_size: int) -> None:
    whole = [read(tw.loader(Numbers(count), Shard(s, shards), batch_size, ranks=12)) for s in range(shards)]
    sizes = Loader(range(count), Shard(0, shards), batch_size, ranks=12)  # type: ignore[arg-type]
    full, tail = sizes.sizes()
    assert len(whole[0]) == full + (tail > 0)
    taken = iter(range(count))
    for size, parts in zip([12 * batch_size] * full + [tail], zip(*whole, strict=True), strict=False):
        assert sorted(n for part in parts for n in part) == [next(taken) for _ in range(size)]
        assert [n % shards for n in parts[0]] == [parts[0][0] % shards] * len(parts[0])


def test_a_stream_begins_anew_in_each_epoch_and_is_told_which() -> None:
    loader = tw.loader(Numbers(8), Shard(0, 1), 4)
    for epoch in range(3):
        batches = list(loader)
        assert [x[:, 0].tolist() for x, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert {float(e) for x, _ in batches for e in x[:, 1]} == {epoch}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_goes_on_where_it_was_with_the_same_random_numbers(num_workers: int) -> None:
    def batches(start: int = 0) -> list[Any]:
        return list(tw.loader(Numbers(20), Shard(1, 2), 3, num_workers=num_workers).batches(4, start))

    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole, rest = batches(), batches(2)
    assert torch.equal(torch.get_rng_state(), before), "reading draws nothing from the training's generators"
    assert len(rest) == len(whole) - 2
    for (x, y), (x_rest, y_rest) in zip(whole[2:], rest, strict=True):
        assert torch.equal(x, x_rest)
        assert torch.equal(y, y_rest)
    in_process = list(tw.loader(Numbers(20), Shard(1, 2), 3).batches(4))
    assert all(torch.equal(one[1], other[1]) for one, other in zip(whole, in_process, strict=True))


def test_a_state_of_a_stream_in_mid_epoch() -> None:
    loader = tw.loader(Numbers(20), Shard(0, 2), 3)
    iterator = iter(loader)
    next(iterator)
    saved = loader.state_dict()
    rest = [y for _, y in iterator]
    again = tw.loader(Numbers(20), Shard(0, 2), 3)
    again.load_state_dict(saved)
    assert all(torch.equal(y, other) for y, (_, other) in zip(rest, again, strict=True))


def test_a_stated_length_is_the_most_that_an_epoch_takes() -> None:
    stream = Sized(40)
    loader = tw.loader(stream, Shard(0, 2), 4)
    assert len(loader) == 5
    stream.count = 100  # more than it said
    assert len(list(loader)) == 5
    with pytest.raises(TypeError, match="without a length"):
        len(tw.loader(Numbers(4), Shard(0, 1), 2))


def test_ranks_read_their_parts_of_a_stream() -> None:
    def train(comm: Comm) -> list[int]:
        trainer = tw.prepare(
            "data_parallel", model=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, comm=comm,
            optimizer=lambda p: torch.optim.SGD(p, 1e-4),
        )  # fmt: skip
        batches = tw.loader(Numbers(23), trainer.shard, batch_size=4)
        seen = []
        for batch in tw.epoch(trainer, batches, comm):
            trainer.step(batch)
            seen += batch[0][:, 0].int().tolist()
        return seen

    evens, odds = tw.simulate(train, ranks=2)
    assert sorted(evens + odds) == list(range(22))
    assert all(n % 2 == 0 for n in evens)


class Noisy(Dataset[tuple[int, float]]):
    """Samples with random numbers of every generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(1).item() + random.random() + float(np.random.rand())


def test_random_samples_depend_on_the_batch_alone() -> None:
    """Not on the number of workers, on where an epoch went on, or on what the training has drawn."""

    def batches(start: int = 0, **options: Any) -> list[list[float]]:
        torch.rand(int(torch.randint(1, 9, ())))  # the training draws something
        return [y.tolist() for _, y in tw.loader(Noisy(), Shard(0, 2), 3, **options).batches(1, start)]

    whole = batches()
    assert len({value for batch in whole for value in batch}) == 12
    for num_workers in (0, 1, 2):
        assert batches(num_workers=num_workers) == whole
        assert batches(2, num_workers=num_workers) == whole[2:]
    assert batches(seed=1) != whole
    assert [y.tolist() for _, y in tw.loader(Noisy(), Shard(1, 2), 3).batches(1)] != whole


def test_a_stream_without_enough_samples_has_no_batch() -> None:
    assert isinstance(tw.loader(Numbers(2), Shard(0, 3), 4), StreamLoader)
    assert read(tw.loader(Numbers(2), Shard(0, 3), 4)) == []


def masked(samples: list[Any]) -> tuple[np.ndarray, dict[str, float]]:
    """A batch of arrays, with random numbers of every generator, as masks of words are."""
    return np.array([int(sample[0]) for sample in samples]), {"mask": torch.rand(1).item() + random.random()}


class Counted(Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 0.0


class Counting(IterableDataset[tuple[int, float]]):
    def __iter__(self) -> Iterator[tuple[int, float]]:
        yield from ((index, 0.0) for index in range(24))


@pytest.mark.parametrize("dataset", [Counted(), Counting()])
def test_what_a_collate_fn_draws_and_returns_depends_on_the_batch_alone(dataset: Any) -> None:
    def batches(epoch: int = 1, start: int = 0, shard: int = 0, **options: Any) -> list[Any]:
        torch.rand(int(torch.randint(1, 9, ())))  # the training draws something
        state = torch.get_rng_state()
        loader = tw.loader(dataset, Shard(shard, 2), 3, collate_fn=masked, **options)
        found = list(loader.batches(epoch, start))
        assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the training's generators"
        assert all(type(batch) is tuple and isinstance(batch[0], np.ndarray) for batch in found)
        return [(indices.tolist(), extra) for indices, extra in found]

    whole = batches()
    assert len({extra["mask"] for _, extra in whole}) == 4
    for num_workers in (0, 1, 2):
        assert batches(num_workers=num_workers) == whole
        assert batches(start=2, num_workers=num_workers) == whole[2:]
    masks = {extra["mask"] for _, extra in whole}
    for others in (batches(epoch=2), batches(shard=1), batches(seed=1)):
        assert not masks & {extra["mask"] for _, extra in others}
