"""One rank's copy of what is trained: a model with its optimizer, and the state that all members share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from thinwire import registry
from thinwire.comm.background import BackgroundWork
from thinwire.comm.base import Comm
from thinwire.comm.board import Board
from thinwire.comm.collectives import coalesced
from thinwire.comm.ledger import Ledger
from thinwire.comm.threads import ThreadComm
from thinwire.common.dtypes import is_averaged
from thinwire.common.fetching import fetch
from thinwire.common.tensors import named_persistent_buffers, to_bytes, unflatten
from thinwire.data import derive_seed, num_samples, to_device
from thinwire.elastic.groups import share_json
from thinwire.elastic.job import Job, refuse_others
from thinwire.elastic.shares import Shares
from thinwire.errors import UsageError
from thinwire.exchange.gradients import NoExchange
from thinwire.exchange.parameters import ParameterAverager
from thinwire.optim import LearningRateWatch
from thinwire.reducers.base import ReducerState
from thinwire.reducers.states import load_states
from thinwire.run.states import Tree, pack, unpack
from thinwire.strategies.learner import Learner
from thinwire.strategies.local_sgd import Periodic
from thinwire.strategies.recipe import Recipe
from thinwire.surgery.moments import OptimizerState, copy_state, states_by_name


@dataclass
class Offer:
    """What a newcomer gets: what all share, and the moments of one member's optimizer.

    It is sent into copies. A transfer that was given up may still go on, and even finish, so it writes into nothing
    that is used.
    """

    shared: list[Tensor]
    tree: Tree  # of the moments, with their tensors by path
    moments: dict[str, Tensor]

    @torch.no_grad()
    def share(self, comm: Comm, root: int) -> None:
        """Make it that of the member at place `root`, on every member."""
        own = self.moments
        outline = {path: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for path, tensor in own.items()}
        self.tree, outline = share_json(comm, root, [self.tree, outline])
        if comm.rank != root:
            self.moments = {
                path: torch.zeros(shape, dtype=getattr(torch, dtype)) for path, (shape, dtype) in outline.items()
            }
        with comm.ledger.purpose("start"):
            for tensors in (list(self.moments.values()), self.shared):
                coalesced(tensors, lambda flat: comm.broadcast(flat, root))


def solo() -> Comm:
    """A group of this rank alone."""
    return ThreadComm(Board(1), [0], 0, "alone", Ledger(), [0])


class Trainee:
    """One rank's model and optimizer, and its copy of what all members share.

    Shared are the agreed parameters, the outer momentum, buffers, and the states of the reducer without residuals.
    The inner optimizer and the residuals are each rank's own; a newcomer begins with the moments of a member.
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
        self.in_flight: list[BackgroundWork[None]] = []  # beside what the averager exchanges
        self._moments: tuple[Tree, dict[str, Tensor]] | None = None  # at the beginning of a round with newcomers
        self.states: list[ReducerState] = list(self.averager.states)
        self.buffers = [buffer.detach().clone() for buffer in named_persistent_buffers(self.model).values()]

    # ---- training

    def train(self, shares: Shares, place: int, after_step: Callable[[], None]) -> list[float]:
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
            after_step()
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
        self.counts = [buffer.clone() for buffer in _counts(self.model)]
        if self.counts:
            lane, before, counts = self.averager.lanes[0], self.averager.in_flight[0].work, self.counts
            self.in_flight = [lane.in_background(lambda: _give_first(counts, lane, before), self.job.device)]

    def is_over(self) -> bool:
        """Whether all results of the exchange are here, or an error."""
        everything = (*self.averager.in_flight[0].work, *self.in_flight)
        return _has_failed(everything) or all(work.future.done() for work in everything)

    def result(self) -> None:
        """Raise the error of an exchange that failed."""
        everything = (*self.averager.in_flight[0].work, *self.in_flight)
        for work in sorted(everything, key=lambda work: not work.future.done()):  # first one that failed
            work.wait()

    def merge(self) -> None:
        """Take the result of the exchange, which is committed."""
        self.averager.merge()
        for buffer, count in zip(_counts(self.model), self.counts, strict=True):
            buffer.copy_(count)
        self._begin_round()

    def discard(self) -> None:
        """Forget the exchange: everything is as before it. Call `use_group` before the next one."""
        self.averager.in_flight.clear()
        self.in_flight = []
        self.averager.states = list(self.states)

    # ---- what all members share

    def offer(self) -> Offer:
        """Copies of what this rank has of the state of the run, at the beginning of this round."""
        if self._moments is None:
            tensors: dict[str, Tensor] = {}
            self._moments = pack(states_by_name(self.model, self.learner.optimizer), tensors), tensors
        return Offer([tensor.clone() for tensor in self._shared()], *self._moments)

    @torch.no_grad()
    def take(self, offer: Offer) -> None:
        """Begin the round with the state that a member has given."""
        for own, tensor in zip(self._shared(), offer.shared, strict=True):
            own.copy_(tensor)
        for bucket in self.averager.buckets:
            torch._foreach_copy_(bucket.x, unflatten(self.averager.agreed[bucket.place], bucket.x))
        for buffer, value in zip(named_persistent_buffers(self.model).values(), self.buffers, strict=True):
            buffer.copy_(value)
        states: dict[str, OptimizerState] = unpack(offer.tree, offer.moments)
        self.learner.new_optimizer({name: copy_state(one, self.job.device) for name, one in states.items()})
        self._begin_round()
        self._moments = offer.tree, offer.moments  # if it is to give them in turn, in this round

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


def _counts(model: nn.Module) -> list[Tensor]:
    """Persistent buffers that have no mean, as BatchNorm's number of batches."""
    return [b for b in named_persistent_buffers(model).values() if not is_averaged(b)]


def _has_failed(works: Sequence[BackgroundWork[None]]) -> bool:
    return any(work.future.done() and work.future.exception() is not None for work in works)


def _give_first(tensors: list[Tensor], comm: Comm, before: Sequence[BackgroundWork[None]]) -> None:
    """Make tensors those of the first member. It trains in every step: others have none where the rest is small."""
    if not _has_failed(before):  # else the group is broken: what is sent over it may never arrive
        coalesced(tensors, lambda flat: comm.broadcast(flat, 0))


def _checksum(tensors: list[Tensor]) -> int:
    value = 0
    for tensor in tensors:
        data: Any = to_bytes(tensor.detach().cpu()).numpy()
        value = zlib.crc32(data, value)
    return value
