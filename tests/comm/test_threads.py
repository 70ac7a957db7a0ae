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


def test_different_shapes_are_refused() -> None:
    with pytest.raises(tw.UsageError, match="ranks gave different tensors"):
        tw.simulate(lambda comm: comm.sum(torch.zeros(1 + comm.rank)), ranks=2)


def test_a_send_returns_when_it_was_received() -> None:
    def train(comm: Comm) -> bool:
        if comm.rank == 0:
            comm.send(torch.zeros(1), to=1)
            return received.is_set()
        threading.Event().wait(0.05)
        received.set()
        comm.recv(torch.zeros(1), source=0)
        return True

    received = threading.Event()
    assert tw.simulate(train, ranks=2) == [True, True]


def test_a_send_to_a_rank_that_has_left_is_an_error() -> None:
    with pytest.raises(tw.RunError, match="lost contact with rank 1"):
        tw.simulate(lambda comm: comm.send(torch.zeros(1), to=1) if comm.rank == 0 else None, ranks=2)


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
