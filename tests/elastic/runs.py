"""Elastic runs whose ranks are threads of this process, over a real store and real gloo groups."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from tests.training import MODELS, decayed_sgd
from tests.worlds import no_grace
from thinwire.comm.addresses import gloo_interface
from thinwire.comm.store import local_store
from thinwire.elastic.job import Job
from thinwire.elastic.member import Member
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes, client
from thinwire.elastic.record import Record
from thinwire.elastic.shares import Position
from thinwire.elastic.trainee import Trainee
from thinwire.optim import cosine

PATIENCE = 6.0  # a fifth of it if a connection broke: the machine may be busy
SAMPLES = 64


def data(num_samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (num_samples,), generator=generator))


def job(strategy: str = "diloco(every=2)", **options: Any) -> Job:
    """Two epochs of two rounds, for two members."""
    whole = Job(
        strategy, lambda: copy.deepcopy(MODELS[0]), data(), nn.functional.cross_entropy, decayed_sgd, 8, 2, cosine()
    )  # fmt: skip
    return replace(whole, **options)


class Killed(BaseException):
    """What a member raises that is to vanish without a word."""


class Mortal(Member):
    """A member that a test can have vanish, stop or wait at a point of an attempt."""

    before: Callable[[str, Mortal], None] = staticmethod(lambda point, member: None)

    def gather(self, meeting: Any) -> Any:
        self.before("gather", self)
        return super().gather(meeting)

    def hand_over(self, meeting: Any) -> Any:
        self.before("hand over", self)
        return super().hand_over(meeting)

    def train(self, meeting: Any) -> Any:
        self.before("train", self)
        return super().train(meeting)

    def exchange(self, meeting: Any) -> Any:
        self.before("exchange", self)
        return super().exchange(meeting)

    def settle(self, meeting: Any, is_last: bool) -> Any:
        self.before("settle", self)
        decided = super().settle(meeting, is_last)
        self.before("decided", self)
        return decided

    def merge(self, meeting: Any, shares: Any) -> Any:
        self.before("merge", self)
        return super().merge(meeting, shares)


class World:
    """A store, and the members that a test starts."""

    def __init__(self, work: Job) -> None:
        self.job, self.store = work, local_store(1)
        self.notes = Notes(self.connect, "the test")
        self.members: list[Mortal] = []
        self.errors: dict[int, BaseException] = {}
        self.threads: list[threading.Thread] = []

    def connect(self) -> dist.Store:
        return client("127.0.0.1", self.store.port)

    def again(self) -> Notes:
        """Notes for a replay, which are not those of the run."""
        return Notes(lambda: dist.PrefixStore("again", self.connect()), "the test")

    def start(
        self, count: int = 1, min_ranks: int = 1, before: Callable[[str, Mortal], None] | None = None,
        patience: float = PATIENCE,
    ) -> list[Mortal]:  # fmt: skip
        """Start ranks as threads."""
        started = []
        for _ in range(count):
            trainee = Trainee(self.job)
            number = len(self.members)
            about = {"name": "here", "host": number, "address": f"127.0.0.{1 + number}"}
            membership = Membership(self.notes.another(), about, patience)
            member = Mortal(membership, trainee, Record(), Position(), self.notes.another(), False)
            if before is not None:
                member.before = before
            thread = threading.Thread(target=self._run, args=(member, min_ranks), daemon=True)
            self.members.append(member)
            started.append(member)
            self.threads.append(thread)
            thread.start()
        return started

    def _run(self, member: Mortal, min_ranks: int) -> None:
        try:
            member.run(min_ranks)
        except BaseException as error:
            self.errors[member.id] = error

    def finish(self) -> None:
        """Wait for all."""
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a member did not end"

    def alive(self) -> list[Mortal]:
        """Members that ended in order."""
        return [member for member in self.members if member.id not in self.errors]


def vanish(member: Mortal) -> None:
    """Be gone as a killed process: no word, no heartbeat, and connections that close."""
    member.membership.heart._stopped.set()
    member.membership.leave = lambda why: None  # type: ignore[method-assign]
    raise Killed


@contextmanager
def world(work: Job) -> Iterator[World]:
    with no_grace(), gloo_interface("127.0.0.1"):
        made = World(work)
        try:
            yield made
        finally:
            made.finish()
