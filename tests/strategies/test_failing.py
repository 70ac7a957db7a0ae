"""One rank fails: nobody waits for it for ever, whatever the strategy and wherever it was."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.strategies.test_laws import STRATEGIES, VARIANTS
from tests.training import batches, part, trainer
from tests.worlds import ends_of
from thinwire.comm.base import Comm

NUM_STEPS, EPOCH = 9, 5
UNEVEN = [
    "daso(warmup_epochs=0)",
    "daso(warmup_epochs=0, merge=delta, max_global_skips=2)",
    "daso(warmup_epochs=1, cooldown_epochs=1)",
    "ab(sync_every=3, warmup=1, cutoff=0.7)",
]


class Broken(Exception):
    """What a rank fails with."""


def train_until(comm: Comm, spec: str, rank: int, step: int, inside: bool, epoch: int = EPOCH) -> int:
    """Train; one rank fails in one step: in its loss, in mid-step, or before it."""
    done = 0

    def loss_of(output: Tensor, targets: Tensor) -> Tensor:
        if inside and (comm.rank, done) == (rank, step):
            raise Broken
        return nn.functional.cross_entropy(output, targets)

    strategy = trainer(comm, spec, loss=loss_of)
    for number, batch in enumerate(batches(NUM_STEPS, 24)):
        done = number
        if not inside and (comm.rank, done) == (rank, step):
            raise Broken
        strategy.step(part(batch, strategy.shard))
        if (number + 1) % epoch == 0:
            strategy.end_epoch()
    strategy.consolidate()
    if (comm.rank, inside) == (rank, True):
        raise Broken  # on a rank that computes no loss
    return done


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 2), (4, 2)])
@pytest.mark.parametrize("spec", [s for s in (*VARIANTS, *UNEVEN) if not s.startswith("pipeline")])
def test_on_threads_every_rank_ends_with_the_one_that_fails(spec: str, ranks: int, nodes: int) -> None:
    choose = random.Random(f"{spec} {ranks}")
    nodes = ranks if spec == "alone" else nodes  # which refuses unequal ones
    for rank in range(ranks):
        step, inside = choose.randrange(NUM_STEPS), choose.random() < 0.5
        with pytest.raises(Broken):
            tw.simulate(lambda comm: train_until(comm, spec, rank, step, inside), ranks=ranks, nodes=nodes)  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("spec", UNEVEN)
def test_a_node_of_one_rank_may_fail_at_any_step(spec: str) -> None:
    for step in range(NUM_STEPS):
        with pytest.raises(Broken):
            tw.simulate(
                lambda comm: train_until(comm, spec, 2, step, inside=False, epoch=NUM_STEPS),  # noqa: B023
                ranks=3,
                nodes=2,
            )


def wait_for_each_other(comm: Comm) -> None:
    if comm.rank == 0:
        comm.recv(torch.zeros(1), 1)
    else:
        comm.sum(torch.zeros(1))


def test_ranks_that_wait_for_each_other_are_told_so() -> None:
    with pytest.raises(tw.RunError, match=r"wait for each other.*rank 0 .*rank 1"):
        tw.simulate(wait_for_each_other, ranks=2)


def wait_and_go_on(comm: Comm) -> float:
    try:
        wait_for_each_other(comm)
    except tw.RunError as error:
        assert "wait for each other" in str(error)  # noqa: PT017
    return comm.split([[0, 1]], "again").sum(torch.ones(1)).item()


def test_ranks_that_were_told_so_can_go_on() -> None:
    assert tw.simulate(wait_and_go_on, ranks=2) == [2.0, 2.0]


def with_a_second_thread(comm: Comm) -> list[float]:
    """Two threads of a rank wait at a time, each for what a group of its own brings."""
    other, found = comm.split([[0, 1]], "other"), []
    second = threading.Thread(target=lambda: found.append(other.sum(torch.ones(1)).item()))
    second.start()
    if comm.rank == 1:
        time.sleep(0.05)
    found.insert(0, comm.sum(torch.ones(1)).item())
    second.join()
    return found


def test_a_rank_may_wait_in_two_threads() -> None:
    for _ in range(5):
        assert tw.simulate(with_a_second_thread, ranks=2) == [[2.0, 2.0]] * 2


@pytest.mark.usefixtures("process_world")  # whose fork server stays
@pytest.mark.parametrize("spec", [*STRATEGIES, "diloco(every=4, fragments=2)", *UNEVEN[:1]])
def test_on_processes_every_rank_ends_with_the_one_that_fails(spec: str) -> None:
    choose = random.Random(spec)
    rank, step, inside = choose.randrange(3), choose.randrange(NUM_STEPS), choose.random() < 0.5
    nodes = [1, 1, 1] if spec == "alone" else [2, 1]
    ends = ends_of(train_until, nodes, spec, rank, step, inside)
    assert ends[rank] == "Broken"
    for other, end in enumerate(ends):
        assert other == rank or end == "PeerLost", f"rank {other}: {end}"
