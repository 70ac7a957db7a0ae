"""Every sample once, the same order everywhere, equal shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import thinwire as tw
from thinwire.data import Loader, Shard, derive_seed


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count).float(), torch.arange(count))


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 20), st.integers(0, 3))
def test_shards_partition_each_epoch(count: int, ranks: int, batch_size: int, epoch: int) -> None:
    if count < ranks:
        with pytest.raises(tw.UsageError, match="cannot be shared"):
            Loader(numbers(count), Shard(0, ranks), batch_size)
        return
    loaders = [Loader(numbers(count), Shard(r, ranks), batch_size) for r in range(ranks)]
    per_rank = [loader.indices(epoch) for loader in loaders]
    sizes = [[len(batch) for batch in batches] for batches in per_rank]
    assert all(s == sizes[0] for s in sizes), "every rank takes the same steps with the same numbers"
    assert len(loaders[0]) == len(sizes[0])
    assert sizes[0][:-1] == [batch_size] * (len(sizes[0]) - 1)
    assert sizes[0], "there is something to do"
    seen = torch.cat([batch for batches in per_rank for batch in batches])
    assert len(seen.unique()) == len(seen), "no sample twice"
    assert len(seen) > count - 2 * ranks, "hardly any is left out"


def test_n_shards_together_are_the_batch_of_one() -> None:
    whole = Loader(numbers(96), Shard(0, 1), 16).indices(3)
    parts = [Loader(numbers(96), Shard(r, 4), 4).indices(3) for r in range(4)]
    for i, batch in enumerate(whole):
        assert sorted(batch.tolist()) == sorted(torch.cat([part[i] for part in parts]).tolist())


@given(st.integers(12, 200), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 9))
def test_fewer_shards_than_ranks_take_the_same_samples_in_every_step(count: int, shards: int, batch_size: int) -> None:
    ranks = [Loader(numbers(count), Shard(r, 12), batch_size).indices(0) for r in range(12)]
    fewer = [Loader(numbers(count), Shard(s, shards), batch_size, ranks=12) for s in range(shards)]
    assert [len(loader) for loader in fewer] == [len(ranks[0])] * shards
    for together, apart in zip(zip(*ranks, strict=True), zip(*(f.indices(0) for f in fewer), strict=True), strict=True):
        assert len({len(part) for part in apart}) == 1, "equal shares"
        assert sorted(torch.cat(apart).tolist()) == sorted(torch.cat(together).tolist())


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return torch.cat(Loader(numbers(50), Shard(0, 1), 5, seed=seed).indices(epoch)).tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_iterating_goes_from_epoch_to_epoch() -> None:
    loader = tw.loader(numbers(20), Shard(0, 1), batch_size=5)
    first, second = (torch.cat([y for _, y in loader]).tolist() for _ in range(2))
    assert first == torch.cat(loader.indices(0)).tolist()
    assert second == torch.cat(loader.indices(1)).tolist()


def test_starting_inside_an_epoch_gives_its_rest() -> None:
    loader = Loader(numbers(20), Shard(0, 1), 5)
    whole = [y.tolist() for _, y in loader.batches(0)]
    assert [y.tolist() for _, y in loader.batches(0, start=2)] == whole[2:]


class Squares(Dataset[tuple[int, int]]):
    """Not a TensorDataset."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index**2


def test_any_map_style_dataset_will_do() -> None:
    loader = tw.loader(Squares(), Shard(1, 2), batch_size=3)
    batches = list(loader)
    assert [x.tolist() for x, _ in batches] == [i.tolist() for i in loader.indices(0)]
    assert all(torch.equal(y, x**2) for x, y in batches)


@pytest.mark.parametrize("dataset", [numbers(12), Squares()], ids=["tensors", "any"])
def test_a_device_changes_no_batch(dataset: Dataset[Any]) -> None:
    plain, placed = (tw.loader(dataset, Shard(1, 2), batch_size=3, device=device) for device in (None, "cpu"))
    for (x, y), (x_placed, y_placed) in zip(plain, placed, strict=True):
        assert torch.equal(x, x_placed)
        assert torch.equal(y, y_placed)
    assert placed.state_dict() == plain.state_dict()


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of which every rank reads a part."""

    def __init__(self, comm: tw.Comm) -> None:
        self.comm = comm

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.comm.rank, 20 + self.comm.rank, self.comm.size):
            yield torch.full((2,), float(number)), torch.tensor([1.0])


def test_ones_own_loop_may_read_a_stream_in_parts() -> None:
    def train(comm: tw.Comm) -> int:
        trainer = tw.prepare(
            "data_parallel", model=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, comm=comm,
            optimizer=lambda p: torch.optim.SGD(p, 1e-4),
        )  # fmt: skip
        batches = DataLoader(Endless(comm), batch_size=3)
        return len([trainer.step(batch) for batch in tw.epoch(trainer, batches, comm)])

    assert tw.simulate(train, ranks=2) == [4, 4]


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(tw.UsageError, match="batch_size=0; possible: whole numbers, 1 or more"):
        tw.loader(numbers(4), Shard(0, 1), batch_size=0)


def test_a_shard_is_the_trainers() -> None:
    with pytest.raises(tw.UsageError, match=r"shard is int; give trainer.shard"):
        tw.loader(numbers(4), 2, batch_size=1)  # type: ignore[arg-type]


def test_mixed_seeds_do_not_collide() -> None:
    seeds = {derive_seed(a, b, c) for a in range(12) for b in range(12) for c in range(12)}
    assert len(seeds) == 12**3
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.integers(0, 13))
def test_a_loader_goes_on_where_another_was_saved(stop: int) -> None:
    straight = tw.loader(numbers(20), Shard(0, 1), batch_size=5)
    whole = [y.tolist() for _ in range(3) for _, y in straight]
    assert straight.state_dict() == straight.state_dict()

    before, seen = tw.loader(numbers(20), Shard(0, 1), batch_size=5), []
    while len(seen) < min(stop, len(whole)):
        for _, y in before:
            seen.append(y.tolist())
            if len(seen) == stop:
                break
    after = tw.loader(numbers(20), Shard(0, 1), batch_size=5)
    after.load_state_dict(before.state_dict())
    while after.epoch < 3:
        seen += [y.tolist() for _, y in after]
    assert seen == whole


@pytest.mark.parametrize("ended", [False, True])
def test_a_loop_that_was_left_early_begins_the_next_epoch(ended: bool) -> None:
    loader = tw.loader(numbers(20), Shard(0, 1), batch_size=5)
    next(iter(loader))
    if ended:
        loader.end_epoch()
        saved, loader = loader.state_dict(), tw.loader(numbers(20), Shard(0, 1), batch_size=5)
        loader.load_state_dict(saved)
    assert torch.cat([y for _, y in loader]).tolist() == torch.cat(loader.indices(1)).tolist()


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Loader(numbers(20), Shard(0, 1), 4), "batch_size"),
        (Loader(numbers(20), Shard(1, 2), 5), "shard"),
        (Loader(numbers(21), Shard(0, 1), 5), "samples"),
        (Loader(numbers(20), Shard(0, 1), 5, seed=1), "seed"),
    ],
)
def test_a_state_of_another_loader_is_refused(other: Loader, what: str) -> None:
    with pytest.raises(tw.UsageError, match=f"state.*{what}"):
        Loader(numbers(20), Shard(0, 1), 5).load_state_dict(other.state_dict())


def test_a_data_loader_is_no_dataset() -> None:
    with pytest.raises(tw.UsageError, match=r"a DataLoader; give the dataset in it: loader\.dataset"):
        tw.loader(DataLoader(numbers(20), 5), Shard(0, 1), batch_size=5)  # type: ignore[arg-type]


def test_reading_samples_draws_no_random_numbers() -> None:
    """Else a run that is tested more often, or goes on in mid-epoch, would have other dropout."""
    before = torch.get_rng_state()
    assert len(list(tw.loader(Squares(), Shard(0, 1), batch_size=2))) > 1
    assert torch.equal(torch.get_rng_state(), before)
