"""The batches of an epoch of a run, each with whether the epoch ends with it; and the clock of the training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch

from thinwire.comm.base import Comm
from thinwire.data import Loader, StreamLoader
from thinwire.errors import UsageError
from thinwire.run.length import Length
from thinwire.run.position import Position

AGREED_STEPS = 8  # batches of a stream that ranks read ahead, to agree that all have them

End = Literal["no", "cut", "complete"]  # whether an epoch ends with a batch: because of --steps, or of the data


class Next(NamedTuple):
    """A batch to train on."""

    batch: Any
    end: End


def epoch_batches(loader: Loader, at: Position, length: Length, comm: Comm) -> Iterator[Next]:
    """The batches that are left of this epoch. Collective if they come from a stream."""
    with closing(loader.batches(at.epoch, start=at.batch)) as batches:
        if isinstance(loader, StreamLoader):
            read = _agreed(batches, at.batch, comm)
        else:
            read = ((batch, number == len(loader)) for number, batch in enumerate(batches, at.batch + 1))
        comm.note("reading samples")
        for step, (batch, is_last) in enumerate(islice(read, length.num_steps - at.step), at.step + 1):
            comm.note(f"training, step {step}")
            yield Next(batch, "complete" if is_last else "cut" if step == length.num_steps else "no")
            comm.note("reading samples")


def _agreed(batches: Iterator[Any], start: int, comm: Comm) -> Iterator[tuple[Any, bool]]:
    """The batches of a stream until the first rank has none, each with whether it is the last. Collective.

    Ranks agree on a few batches at a time, at the same places of the epoch wherever a run goes on.
    """

    def agree(most: int) -> list[Any]:
        some = list(islice(batches, most))
        with comm.ledger.purpose("sync"):
            return some[: min(int(number) for number in comm.all_gather(torch.tensor([len(some)])))]

    before = comm.ledger.rows()
    most = AGREED_STEPS - start % AGREED_STEPS
    some = agree(most)
    if start:
        comm.ledger.load_rows(before)  # of a run that goes on: it had agreed on these batches before it was stopped
    elif not some:
        raise UsageError(
            f"the stream of training data gave less than a sample for each of {comm.size} ranks; it must begin anew "
            "whenever it is iterated"
        )
    while some:
        for batch in some[:-1]:
            yield batch, False
        following = agree(AGREED_STEPS) if len(some) == most else []
        yield some[-1], not following
        some, most = following, AGREED_STEPS


class TrainingClock:
    """The seconds of training, without tests and checkpoints; and its speed."""

    def __init__(self, at: Position) -> None:
        self._begin = time.monotonic() - at.train_seconds
        self._epoch = self._row = (at.samples, at.train_seconds)

    def seconds(self) -> float:
        """Seconds of training in all."""
        return time.monotonic() - self._begin

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, time does not count."""
        before = time.monotonic()
        try:
            yield
        finally:
            self._begin += time.monotonic() - before

    def speed(self, at: Position) -> float:
        """Samples per second in this epoch, or since the run went on in its middle."""
        return _speed(self._epoch, at)

    def speed_since_row(self, at: Position) -> float:
        """Samples per second since this was last asked, at most since the epoch began."""
        speed = _speed(self._row, at)
        self._row = (at.samples, at.train_seconds)
        return speed


def _speed(since: tuple[int, float], at: Position) -> float:
    return (at.samples - since[0]) / max(at.train_seconds - since[1], 1e-9)
