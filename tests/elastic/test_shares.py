"""Who trains which samples: nobody trains one twice, and with a membership that stays it is what a Loader deals out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from thinwire.data import Loader, Shard
from thinwire.elastic.shares import Position, share_out, weights


@settings(max_examples=40)
@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    every=st.integers(1, 5),
    members=st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_no_sample_is_given_out_twice_in_an_epoch(
    num_samples: int, batch_size: int, every: int, members: list[int]
) -> None:
    at, trained = Position(), []
    for number in members:  # as many members as there are in each round
        shares = share_out(at, num_samples, number, batch_size, every)
        parts = [shares.indices(place, seed=5) for place in range(number)]
        assert [sum(len(part) for _, part in mine) for mine in parts] == shares.counts(number)
        most = batch_size if batch_size == 1 else max(batch_size, 3)  # three where two would leave a single one
        assert all(1 <= len(part) <= most for mine in parts for _, part in mine)
        if batch_size > 1 and num_samples > 1:
            assert all(len(part) > 1 for mine in parts for _, part in mine)  # BatchNorm needs two
        trained += [(at.epoch, int(sample)) for mine in parts for _, part in mine for sample in part]
        assert shares.end.round == at.round + 1
        if shares.end.epoch > at.epoch:
            of_epoch = [sample for epoch, sample in trained if epoch == at.epoch]
            assert len(of_epoch) >= num_samples - 1
        at = shares.end
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize(("num_samples", "ranks", "batch_size"), [(64, 2, 8), (60, 4, 5), (46, 3, 5), (63, 1, 4)])
def test_a_membership_that_stays_reads_what_a_loader_does(num_samples: int, ranks: int, batch_size: int) -> None:
    dataset = TensorDataset(torch.arange(num_samples))
    for rank in range(ranks):
        loader = Loader(dataset, Shard(rank, ranks), batch_size, seed=3)
        at, found = Position(), []
        while at.epoch < 2:
            shares = share_out(at, num_samples, ranks, batch_size, every=2)
            found += [(step.number, part.tolist()) for step, part in shares.indices(rank, seed=3)]
            at = shares.end
        assert found == [(i, part.tolist()) for epoch in range(2) for i, part in enumerate(loader.indices(epoch))]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_the_weights_of_a_round_sum_to_1(counts: list[int]) -> None:
    found = weights(counts)
    assert sum(found) / len(counts) == pytest.approx(1, abs=1e-12)
    if len(set(counts)) == 1:
        assert found == [1.0] * len(counts)  # exactly: nothing is multiplied


def test_the_learning_rate_follows_the_samples_that_were_given_out() -> None:
    few, many = share_out(Position(), 64, 2, 8, 2), share_out(Position(), 64, 4, 8, 1)
    assert few.end.given == many.end.given == 32
    assert few.epochs_done(few.steps[0]) == 8 / 64
    assert many.epochs_done(many.steps[0]) == 16 / 64
    later = share_out(Position(7, 1, 48, 3), 64, 2, 8, 2)
    assert [later.epochs_done(step) for step in later.steps] == [1 + 56 / 64]
    assert later.end == Position(8, 2)
