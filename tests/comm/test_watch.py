"""Ranks that wait say for whom, and go on when it comes; when patience is over, all say who was late."""

from __future__ import annotations

import datetime
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.worlds import ProcessWorlds, no_grace
from thinwire.comm import sightings
from thinwire.comm.process import ProcessComm
from thinwire.comm.user_groups import comm_like
from thinwire.errors import PeerLost


@contextmanager
def heard() -> Iterator[list[str]]:
    """What this rank says inside."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, keep = logging.getLogger("thinwire"), Keep()
    logger.addHandler(keep)
    try:
        yield said
    finally:
        logger.removeHandler(keep)


@contextmanager
def patient(seconds: float) -> Iterator[ProcessComm]:
    """All ranks with so much patience; the first notice comes after a third of it."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    own = comm_like(group, torch.device("cpu"))
    try:
        yield own
    finally:
        own.close()


def some(rank: int) -> Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank))


def stop_until(seconds: float, comm: ProcessComm) -> None:
    """Rank 2 stops; rank 0 wakes it after so many seconds, while it does something else."""
    pids = comm.all_gather(torch.tensor([os.getpid()]))
    if comm.rank == 0 and seconds:
        threading.Timer(seconds, os.kill, (int(pids[2]), signal.SIGCONT)).start()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


Told = tuple[list[str], list[float], list[float], bool]


def one_is_busy(comm: ProcessComm) -> Told:
    with heard() as said, patient(6) as own:
        pair = own.split([[0], [1, 2]], "pair")
        for _ in range(200):  # nobody waits for long: nothing is said
            before = own.mean(some(own.rank))
        calm = not said
        if own.rank == 2:
            own.note("reading a slow disk")
            time.sleep(3)
        if own.rank > 0:
            pair.mean(some(own.rank))
        after = own.mean(some(own.rank))
    return said, before.tolist(), after.tolist(), calm


def test_a_busy_rank_is_named_by_one_rank_also_if_others_wait_for_it_in_between(process_world: ProcessWorlds) -> None:
    told = process_world.run(one_is_busy, 3)
    said, before, after, _ = told[0]
    assert re.fullmatch(
        r"rank 2 \(busy: reading a slow disk\) has not reached all_reduce of training, for 2 s; waiting up to 6 s",
        said[0],
    )
    assert re.fullmatch(r"going on after \d(\.\d)? s", said[-1])
    assert (told[1][0], told[2][0]) == ([], [])  # rank 1 waits too, and leaves it to rank 0
    assert all(one[3] and one[1:3] == (before, before) for one in told)
    assert after == before


def one_is_stopped(comm: ProcessComm) -> Told:
    with heard() as said, patient(6) as own:
        before = own.mean(some(own.rank))
        stop_until(3.5, comm)
        after = own.all_gather(some(own.rank))
    return said, before.tolist(), torch.stack(after).mean(0).tolist(), True


def test_a_stopped_rank_is_named_and_waited_for(process_world: ProcessWorlds) -> None:
    told = process_world.run(one_is_stopped, 3)
    said = told[0][0]
    assert re.match(
        r"rank 2 \(no sign of life for \d(\.\d)? s(; last: after .*)?\) has not reached all_gather", said[0]
    )
    assert [one[0] for one in told[1:]] == [[], []]
    assert told[0][1:] == told[1][1:] == told[2][1:]


def one_stops_for_too_long(comm: ProcessComm) -> tuple[str, int]:
    message = ""
    pids = comm.all_gather(torch.tensor([os.getpid()]))
    with no_grace(), patient(3) as own:
        own.note("saving a checkpoint")
        own.sum(some(own.rank))
        time.sleep(1)  # so that the note is told
        stop_until(0, comm)
        try:
            own.sum(some(own.rank))
        except PeerLost as error:
            message = str(error)
    if comm.rank == 0:
        os.kill(int(pids[2]), signal.SIGCONT)
    comm.barrier()  # the world is as it was
    return message, sum(one.name.startswith("thinwire-watch") for one in threading.enumerate())


def test_when_patience_is_over_all_ranks_say_who_was_late(process_world: ProcessWorlds) -> None:
    told = process_world.run(one_stops_for_too_long, 3)
    first = told[0][0]
    assert re.match(
        r"rank 2 \(no sign of life for [\d.]+ s; last: saving a checkpoint\) has not reached all_reduce of training, "
        r"for 3 s; patience is over: look at that machine and its link \(thinwire doctor\), or be more patient: ",
        first,
    )
    assert told == [(first, 1)] * 3  # the thread of the world itself is left


def test_a_store_that_does_not_answer_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightings, "ANSWER_SECONDS", 0.05)
    asked, answer = threading.Event(), threading.Event()

    def question() -> str:
        asked.set()
        answer.wait(10)
        return "late"

    assert sightings.ask_in_time(question) is None
    assert asked.is_set()
    answer.set()
    assert sightings.ask_in_time(question) == "late"
