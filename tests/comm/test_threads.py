"""What is special about ranks as threads: nobody hangs when one of them is gone."""

from __future__ import annotations

import threading

import pytest
import torch

import thinwire as tw
from thinwire.comm.base import Comm


def test_an_error_on_one_rank_ends_all_and_is_the_one_that_is_raised() -> None:
    def train(comm: Comm) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("rank 2's own")
        comm.sum(torch.zeros(1))

    with pytest.raises(ZeroDivisionError, match="rank 2's own"):
        tw.simulate(train, ranks=4)


def test_a_rank_that_leaves_early_does_not_hang_the_others() -> None:
    def train(comm: Comm) -> None:
        if comm.rank != 1:
            comm.sum(torch.zeros(1))

    with pytest.raises(tw.RunError, match=r"rank 1 \(it has finished\)"):
        tw.simulate(train, ranks=3)


def test_what_finished_ranks_sent_still_arrives() -> None:
    def train(comm: Comm) -> float:
        if comm.rank == 0:
            comm.send(torch.tensor([7.0]), to=1)
            return 0.0
        threading.Event().wait(0.05)
        return comm.recv(torch.empty(1), source=0).item()

    assert tw.simulate(train, ranks=2) == [0.0, 7.0]


def test_nothing_is_left_on_the_board() -> None:
    def train(comm: Comm) -> int:
        for _ in range(20):
            comm.mean(torch.zeros(3))
            comm.broadcast(torch.zeros(3))
        comm.barrier()
        return len(comm.board.posts)

    assert max(tw.simulate(train, ranks=3)) <= 3


def test_sixty_four_ranks() -> None:
    assert tw.simulate(lambda comm: comm.sum(torch.ones(1)).item(), ranks=64) == [64.0] * 64


def test_no_ranks_is_refused() -> None:
    with pytest.raises(tw.UsageError, match="ranks=0; possible: 1 or more"):
        tw.simulate(lambda comm: None, ranks=0)
