"""What is trained, and one rank's copy of it: a model with its optimizer, and the state that all members share."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset, default_collate

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.board import Board
from thinwire.comm.collectives import coalesced
from thinwire.comm.ledger import Ledger
from thinwire.comm.threads import ThreadComm
from thinwire.common.fetching import fetch
from thinwire.common.tensors import named_persistent_buffers, to_bytes, unflatten
from thinwire.data import Batch, derive_seed, num_samples, to_device
from thinwire.elastic.shares import Shares
from thinwire.errors import UsageError
from thinwire.exchange.gradients import NoExchange
from thinwire.exchange.parameters import ParameterAverager
from thinwire.losses import Loss
from thinwire.optim import LearningRateWatch, OptimizerFactory, Schedule
from thinwire.reducers.base import ReducerState
from thinwire.reducers.states import load_states
from thinwire.spec import parse
from thinwire.strategies.learner import Learner
from thinwire.strategies.local_sgd import Periodic
from thinwire.strategies.recipe import Recipe


def constant(done: float, total: float) -> float:
    """The schedule of a constant learning rate."""
    return 1.0


def as_it_is(batch: Batch, generator: Generator) -> Batch:
    """The transform that changes nothing."""
    return batch


@dataclass(frozen=True)
class Job:
    """What is trained; equal on all members."""

    strategy: str  # a spec: local_sgd or diloco
    model: Callable[[], nn.Module]
    dataset: Dataset[Any]  # map-style
    loss: Loss | None
    optimizer: OptimizerFactory
    batch_size: int  # samples of a member in each local step
    epochs: int
    schedule: Schedule = constant  # (epochs done, epochs in total) → factor of the learning rate
    seed: int = 0
    clip_norm: float | None = None
    accumulate: int = 1
    autocast: bool = False
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Batch] = default_collate
    transform: Callable[[Batch, Generator], Batch] = as_it_is  # augmentation, on the device
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def refuse_others(spec: str) -> None:
    """Raise UsageError for a strategy whose ranks cannot leave and join between rounds."""
    named = parse(spec)
    kind, possible = registry.load("strategies", named.name), []
    for name in registry.TABLE["strategies"]:
        if issubclass(registry.load("strategies", name), Periodic):
            possible.append(name)
    if issubclass(kind, Periodic):
        return
    why = (
        "its nodes exchange gradients inside in every step, and a node that loses a rank would have to go on with fewer"
        if named.name == "daso"
        else "its ranks meet in every step, or each has a part of the model"
    )
    raise UsageError(f"elastic: {named.name} cannot go on when a rank leaves: {why}; possible: {', '.join(possible)}")


def solo() -> Comm:
    """A group of this rank alone."""
    return ThreadComm(Board(1), [0], 0, "alone", Ledger(), [0])


class Trainee:
    """One rank's model and optimizer, and its copy of what all members share.

    Shared are the agreed parameters, the outer momentum, buffers, and the states of the reducer without residuals.
    The inner optimizer and the residuals are each rank's own.
    """

    def __init__(self, job: Job) -> None:
        refuse_others(job.strategy)
        self.job, self.num_samples = job, num_samples(job.dataset, "the dataset")
        self.generator = Generator(job.device)
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new model and a new optimizer, as a rank has them that has just come."""
        self.lr_factor, job = 1.0, self.job
        self.model = job.model().to(job.device)
        self.learning_rate = LearningRateWatch(job.optimizer)
        recipe = Recipe(
            job.loss, self.learning_rate, lambda step: self.lr_factor, job.clip_norm, job.accumulate, job.autocast,
            job.epochs,
        )  # fmt: skip
        strategy: Periodic = registry.build("strategies", job.strategy, self.model, recipe, solo())
        rounds = strategy.rounds
        if len(rounds.averaging.fragments) > 1 or rounds.delay:
            raise UsageError(
                f"elastic: {job.strategy} trains on while an exchange is in flight, and a rank that is lost then would "
                "leave it half merged; possible: fragments=1 and wait=0"
            )
        self.learner: Learner = strategy.learner
        self.every, self.averager = rounds.every, rounds.averaging
        self.no_exchange = NoExchange(self.model)
        self._begin_round()

    def _begin_round(self) -> None:
        """Note what a round that turns out void leaves as it was."""
        self.states: list[ReducerState] = list(self.averager.states)
        self.buffers = [buffer.detach().clone() for buffer in named_persistent_buffers(self.model).values()]

    # ---- training

    def train(self, shares: Shares, place: int) -> list[float]:
        """Train one's samples of a round; returns the loss of each step."""
        job, mine = self.job, shares.indices(place, self.job.seed)
        seeds = [derive_seed(job.seed, shares.at.epoch, step.number, place) for step, _ in mine]
        batches = fetch(
            job.dataset, [indices for _, indices in mine], job.num_workers, seeds, job.device, job.collate_fn
        )  # fmt: skip
        losses = []
        self.model.train()
        for (step, _), seed, read in zip(mine, seeds, batches, strict=True):
            self.lr_factor = job.schedule(shares.epochs_done(step), job.epochs)
            batch = job.transform(to_device(read, job.device), self.generator.manual_seed(seed))
            losses.append(self.learner.backward(batch, self.no_exchange))
            self.learner.update()
        self.learner.check_finite()
        return [float(loss) for loss in losses]

    # ---- a round of several members

    def use_group(self, comm: Comm) -> None:
        """Exchange with these members from now on.

        What exchanges is new, with copies: an exchange that was given up may still write into its own.
        """
        before = self.averager
        self.averager = ParameterAverager(self.model, before.reducer, comm, 1, before.outer)
        self.averager.agreed.copy_(before.agreed)
        self.averager.momentum.copy_(before.momentum)
        self.averager.states = list(self.states)

    def start_exchange(self, weight: float) -> None:
        """Start to average how far the members have moved."""
        self.averager.weight = weight
        self.averager.start(with_snapshot=False)

    def is_over(self) -> bool:
        """Whether all results of the exchange are here, or an error."""
        return all(work.future.done() for exchange in self.averager.in_flight for work in exchange.work)

    def result(self) -> None:
        """Raise the error of an exchange that failed."""
        self.averager.in_flight[0].wait()

    def merge(self) -> None:
        """Take the result of the exchange, which is committed."""
        self.averager.merge()
        self._begin_round()

    def discard(self) -> None:
        """Forget the exchange: everything is as before it. Call `use_group` before the next one."""
        self.averager.in_flight.clear()
        self.averager.states = list(self.states)

    # ---- what all members share

    @torch.no_grad()
    def hand_over(self, comm: Comm, root: int, is_new: bool) -> None:
        """Give newcomers the shared state of the beginning of this round, from the member at place `root`."""
        shared = self._shared()
        given = shared if is_new else [tensor.clone() for tensor in shared]
        with comm.ledger.purpose("start"):
            coalesced(given, lambda flat: comm.broadcast(flat, root))
        if is_new:
            for bucket in self.averager.buckets:
                torch._foreach_copy_(bucket.x, unflatten(self.averager.agreed[bucket.place], bucket.x))
            for buffer, value in zip(named_persistent_buffers(self.model).values(), self.buffers, strict=True):
                buffer.copy_(value)
            self._begin_round()

    def _shared(self) -> list[Tensor]:
        """Of the beginning of the round: the parameters and buffers of the model may have moved on since."""
        states = [state[key] for state in self.states for key in sorted(state) if "residual/" not in key]
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        return [self.averager.agreed, self.averager.momentum, *states, *self.buffers, *frozen]

    def checksums(self) -> dict[str, int]:
        """Of the agreed parameters with the buffers, and of the outer momentum."""
        return {
            "agreed": _checksum([self.averager.agreed, *self.buffers]), "momentum": _checksum([self.averager.momentum])
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on at the beginning of a round."""
        return {
            "learner": self.learner.state_dict(), "agreed": self.averager.agreed, "momentum": self.averager.momentum,
            "reducer": self.averager.states,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.learner.load_state_dict(state["learner"])
        self.averager.agreed.copy_(state["agreed"])
        self.averager.momentum.copy_(state["momentum"])
        self.averager.states = load_states(self.averager.states, state["reducer"])
        self._begin_round()


def _checksum(tensors: list[Tensor]) -> int:
    value = 0
    for tensor in tensors:
        data: Any = to_bytes(tensor.detach().cpu()).numpy()
        value = zlib.crc32(data, value)
    return value
