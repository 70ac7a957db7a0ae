"""Who trains which samples of a round: a pure function of the position and of the number of members.

So no sample is given out twice in an epoch, and a recorded membership repeats a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.data import derive_seed


@dataclass(frozen=True)
class Position:
    """How far a run has come, counted in samples that were given out."""

    round: int = 0
    epoch: int = 0
    given: int = 0  # samples of this epoch
    step: int = 0  # in this epoch


class Step(NamedTuple):
    """One local step of all members: the samples from `start` on in the order of the epoch, dealt out to `takers`."""

    number: int  # in the epoch
    start: int
    size: int
    takers: int  # the first so many members; the others have no samples in this step


@dataclass(frozen=True)
class Shares:
    """The samples of one round.

    >>> shares = share_out(Position(), num_samples=10, members=2, batch_size=2, every=8)
    >>> [step.size for step in shares.steps], shares.counts(2), shares.end
    ([4, 4, 2], [6, 4], Position(round=1, epoch=1, given=0, step=0))
    """

    at: Position
    num_samples: int  # of an epoch
    steps: list[Step]
    end: Position  # where the next round begins

    def counts(self, members: int) -> list[int]:
        """The number of samples of each member."""
        return [sum(len(range(i, step.size, step.takers)) for step in self.steps if i < step.takers)
                for i in range(members)]  # fmt: skip

    def indices(self, place: int, seed: int) -> list[tuple[Step, Tensor]]:
        """The steps of the member at a place, and the samples of each."""
        order = epoch_order(seed, self.at.epoch, self.num_samples)
        return [
            (step, order[step.start : step.start + step.size][place :: step.takers])
            for step in self.steps
            if place < step.takers
        ]

    def epochs_done(self, step: Step) -> float:
        """Epochs in the middle of a step: what the schedule of the learning rate is a function of."""
        begun = 2 * (self.at.epoch * self.num_samples + step.start) + step.size
        return begun / (2 * self.num_samples)


def share_out(at: Position, num_samples: int, members: int, batch_size: int, every: int) -> Shares:
    """The samples of the round that begins at a position: of `every` steps, or up to the end of the epoch.

    Each step takes the next members·batch_size samples. The last one of an epoch takes the rest, dealt out so that
    nobody gets a single sample, with which BatchNorm cannot compute; one sample alone is left out.
    """
    least = min(2, batch_size, num_samples)
    steps: list[Step] = []
    given = at.given
    while len(steps) < every and num_samples - given >= least:
        size = min(members * batch_size, num_samples - given)
        takers = members if size == members * batch_size else min(members, size // least)
        steps.append(Step(at.step + len(steps), given, size, takers))
        given += size
    is_over = num_samples - given < least
    if is_over:
        end = Position(at.round + 1, at.epoch + 1)
    else:
        end = Position(at.round + 1, at.epoch, given, at.step + len(steps))
    return Shares(at, num_samples, steps, end)


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The order of an epoch's samples, as `thinwire.loader` has it."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))


def weights(counts: Sequence[int]) -> list[float]:
    """The weight of each member in the mean by the samples that it trained; 1 on average, exactly 1 if all are equal.

    >>> weights([6, 4]), weights([5, 5, 5]), weights([0, 0])
    ([1.2, 0.8], [1.0, 1.0, 1.0], [1.0, 1.0])
    """
    total = sum(counts)
    return [len(counts) * count / total for count in counts] if total else [1.0] * len(counts)
