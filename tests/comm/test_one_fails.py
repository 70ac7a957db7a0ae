"""One rank fails inside of an operation, or leaves: the others are told who, at once, whatever the operation is."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import thinwire as tw
from tests.worlds import ProcessWorlds, ends_of, no_grace
from thinwire.comm import join as joining
from thinwire.comm.base import Comm
from thinwire.comm.join import default_group, gather_numbers
from thinwire.comm.secret import VARIABLE
from thinwire.errors import PeerLost

RANKS = 3
AT_ONCE_SECONDS = 10.0  # a rank that is not told waits for a minute or more
SMALL, LARGE = 3, 2**17  # numbers; some operations of gloo are others for large tensors


class Broken(Exception):
    """What a rank fails with."""


def in_background(comm: Comm, lane: int) -> object:
    group = comm.lanes[lane % len(comm.lanes)]
    return group.in_background(lambda: group.sum(torch.ones(SMALL)), torch.device("cpu")).wait()


def to_or_from(comm: Comm, lost: int) -> object:
    """Every other rank exchanges something with the lost one; which of the two is first differs."""
    if comm.rank < lost:
        return comm.recv(torch.zeros(LARGE), lost)
    return comm.send(torch.ones(LARGE), lost)


def started(comm: Comm, lost: int) -> object:
    works = [comm.irecv(torch.zeros(SMALL), lost), comm.isend(torch.ones(SMALL), lost)]
    return [work.wait() for work in works]


OPERATIONS: dict[str, Callable[[Comm, int], object]] = {
    "sum": lambda comm, _: comm.sum(torch.ones(SMALL)),
    "sum of a large tensor": lambda comm, _: comm.sum(torch.ones(LARGE)),
    "mean": lambda comm, _: comm.mean(torch.ones(SMALL)),
    "started mean": lambda comm, _: comm.start_mean(torch.ones(SMALL)).wait(),
    "min": lambda comm, _: comm.min(torch.ones(SMALL)),
    "max": lambda comm, _: comm.max(torch.ones(SMALL)),
    "barrier": lambda comm, _: comm.barrier(),
    "all_gather": lambda comm, _: comm.all_gather(torch.ones(SMALL)),
    "all_gather of a large tensor": lambda comm, _: comm.all_gather(torch.ones(LARGE)),
    "all_to_all": lambda comm, _: comm.all_to_all([torch.ones(SMALL)] * comm.size),
    "all_to_all of large tensors": lambda comm, _: comm.all_to_all([torch.ones(LARGE)] * comm.size),
    "broadcast from it": lambda comm, lost: comm.broadcast(torch.ones(SMALL), root=lost),
    "send or recv": to_or_from,
    "isend and irecv": started,
    "split": lambda comm, _: comm.split([list(range(comm.size))], "part"),
    "in the background": lambda comm, _: in_background(comm, 0),
    "in the background of another lane": lambda comm, _: in_background(comm, 1),
}


def perform(comm: Comm, operation: str, lost: int, steps: int, messages: dict[int, str]) -> None:
    """Some steps of an operation; one rank fails before the last. Each other rank leaves what it was told."""
    for step in range(steps):
        if comm.rank == lost and step == steps - 1:
            raise Broken
        try:
            if comm.rank != lost or "send" not in operation:
                OPERATIONS[operation](comm, lost)
        except PeerLost as error:
            messages[comm.rank] = str(error)
            raise


@pytest.mark.parametrize("lost", range(RANKS))
@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one != "split"])  # threads split without waiting
def test_on_threads_all_others_name_the_lost_rank(operation: str, lost: int) -> None:
    messages: dict[int, str] = {}
    steps = 1 if "send" in operation else 3
    begin = time.monotonic()
    with pytest.raises(Broken):
        tw.simulate(lambda comm: perform(comm, operation, lost, steps, messages), ranks=RANKS)
    assert time.monotonic() - begin < AT_ONCE_SECONDS
    assert sorted(messages) == [rank for rank in range(RANKS) if rank != lost]
    for message in messages.values():
        assert f"lost contact with rank {lost} (Broken" in message or "has ended" in message or "PeerLost" in message


@pytest.mark.parametrize("lost", range(RANKS))
def test_on_threads_a_rank_that_leaves_early_is_missed(lost: int) -> None:
    def leave_early(comm: Comm) -> str:
        if comm.rank == lost:
            return "left"
        try:
            comm.sum(torch.ones(SMALL))
        except PeerLost as error:
            return str(error)
        return "not told"

    found = tw.simulate(leave_early, ranks=RANKS)
    told = f"lost contact with rank {lost} (it has finished)"
    assert found == ["left" if rank == lost else told for rank in range(RANKS)]


def leave_groups(comm: Comm, lost: int) -> dict[str, str]:
    """For each operation a group, in which one rank leaves; returns how operations ended here, if not as promised."""
    found = {}
    for operation, run in OPERATIONS.items():
        group = comm.split([list(range(comm.size))], operation)
        end, begin = "not told", time.monotonic()
        try:
            if comm.rank == lost:
                group.close()  # as an error does that leaves `with thinwire.join()`
                end = ""
            else:
                with no_grace():
                    run(group, lost)
        except PeerLost:
            end = "" if time.monotonic() - begin < AT_ONCE_SECONDS else "told late"
        finally:
            comm.close_subgroups()
            gc.collect()  # the error of another thread refers to its frames, and they to the group; a process would end
        if end:
            found[operation] = end
        comm.barrier()
    return found


@pytest.mark.parametrize("lost", range(RANKS))
def test_on_processes_no_rank_waits_for_one_that_left(lost: int, process_world: ProcessWorlds) -> None:
    assert process_world.run(leave_groups, RANKS, lost) == [{}] * RANKS


KILLED_IN = {
    **OPERATIONS,
    "meeting in a group": lambda comm, _: gather_numbers([1], default_group(), torch.device("cpu")),
}


def killed_in(comm: Comm, operation: str, lost: int) -> None:
    """One rank is killed while the others are in an operation, which it has done with them before."""
    if operation == "leaving":
        comm.barrier()
    else:
        KILLED_IN[operation](comm, lost)
    if comm.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    if operation != "leaving":
        KILLED_IN[operation](comm, lost)


@pytest.mark.usefixtures("process_world")  # whose fork server stays
@pytest.mark.parametrize(
    ("operation", "lost"),
    [
        ("sum", 0),
        ("all_to_all", 1),
        ("split", 2),
        ("in the background of another lane", 0),
        ("leaving", 1),
        ("meeting in a group", 1),
    ],
)
def test_on_processes_no_rank_waits_for_one_that_was_killed(operation: str, lost: int) -> None:
    others = "" if operation == "leaving" else "PeerLost"
    begin = time.monotonic()
    assert ends_of(killed_in, [2, 1], operation, lost) == [
        "ended without a word" if rank == lost else others for rank in range(RANKS)
    ]
    assert time.monotonic() - begin < 3 * AT_ONCE_SECONDS


def killed_while_joining(comm: Comm, before: str, secret: str, lost: int) -> None:
    """One rank is killed before a step of joining, which the others are in; they join in a group that is there."""
    if comm.rank == lost:
        setattr(joining, before, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    joining.timeout_of = lambda _: datetime.timedelta(seconds=3)  # type: ignore[attr-defined]  # of the second group
    if secret:
        os.environ[VARIABLE] = secret
    with tw.join(device="cpu"):
        pass


@pytest.mark.usefixtures("process_world")  # whose fork server stays
@pytest.mark.parametrize("secret", ["", "a secret that no other program knows"], ids=["open", "secret"])
@pytest.mark.parametrize("before", ["gather_numbers", "new_group", "check_peers"])
def test_a_rank_that_is_killed_while_ranks_join_is_missed_as_in_training(before: str, secret: str) -> None:
    begin = time.monotonic()
    assert ends_of(killed_while_joining, [2, 1], before, secret, 1) == ["PeerLost", "ended without a word", "PeerLost"]
    assert time.monotonic() - begin < 3 * AT_ONCE_SECONDS
