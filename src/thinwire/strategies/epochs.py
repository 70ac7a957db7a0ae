"""The batches of an epoch, equally many on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized

import torch

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.data import Batch, Loader
from thinwire.errors import UsageError
from thinwire.strategies.base import Strategy


def epoch(trainer: Strategy, batches: Iterable[Batch], comm: Comm) -> Iterator[Batch]:
    """The batches of one epoch, equally many on every rank, and then the epoch's end. Collective.

    Ranks may have different numbers of batches: all stop with the shortest, and say so, unless the strategy can do
    without some of them for a while, as ist can. They agree on that once, or, where a number cannot be told beforehand,
    before every batch, and then all stop with the shortest. Whoever leaves the loop early ends the epoch with
    `trainer.end_epoch()` and, of a `tw.loader`, `batches.end_epoch()`. A loader whose state was loaded goes on in
    mid-epoch.

    >>> import thinwire as tw, torch
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> with tw.join() as comm:
    ...     trainer = tw.prepare("local_sgd", model=torch.nn.Linear(2, 1), comm=comm,
    ...                          optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=torch.nn.functional.mse_loss)
    ...     len([trainer.step(batch) for batch in tw.epoch(trainer, data, comm)])
    3
    """
    if not hasattr(trainer, "end_epoch"):
        raise UsageError(
            f"epoch: {type(trainer).__name__} is not a trainer; the order is tw.epoch(trainer, batches, comm)"
        )
    iterator = iter(batches)
    number, done = (batches.epoch, batches.batch) if isinstance(batches, Loader) else (0, 0)
    if isinstance(batches, Loader):
        _check_places(batches, comm)
    yield from _equally_many(trainer, iterator, done, _length(batches) - done, comm)
    trainer.end_epoch()
    if isinstance(batches, Loader) and batches.epoch == number:  # else it saw the last batch go by itself
        batches.end_epoch()


def _check_places(loader: Loader, comm: Comm) -> None:
    """Stop ranks that go on from states of different steps: their models would differ from then on. Collective."""
    with comm.ledger.purpose("sync"):
        own = torch.tensor([loader.epoch, loader.batch, len(loader)])
        places = [place.tolist() for place in comm.all_gather(own)]
    steps = max(batch for _, batch, _ in places)
    if any((epoch, batch) != (loader.epoch, min(steps, length)) for epoch, batch, length in places):
        where = ", ".join(f"rank {r} at batch {batch} of epoch {epoch}" for r, (epoch, batch, _) in enumerate(places))
        raise UsageError(
            f"ranks are at different places: {where}; load on every rank the state of the same step (docs/library.md, "
            "Stop and go on)"
        )


def _equally_many(
    trainer: Strategy, iterator: Iterator[Batch], done: int, num_left: int, comm: Comm
) -> Iterator[Batch]:
    """Of an epoch with so many batches behind it, and so many left; a negative number stands for one unknown."""

    def gathered(mine: int) -> list[int]:
        with comm.ledger.purpose("sync"):
            return [int(number) for number in comm.all_gather(torch.tensor([mine]))]

    numbers = gathered(num_left)
    least, most = min(numbers), max(numbers)
    if trainer.allows_uneven and least >= 0:
        trainer.begin_epoch(done + most)
        given = 0
        for given, mine in enumerate(itertools.islice(iterator, num_left), 1):  # noqa: B007
            yield mine
        for _ in range(most - given):
            trainer.skip_step()
        return
    trainer.begin_epoch(done + least if least >= 0 else None)
    if least >= 0:
        if least < most:
            say(f"ranks have {least} to {most} batches; all stop after {least}", comm.rank, once=True)
        yield from itertools.islice(iterator, least)
        return
    while all(gathered((batch := next(iterator, None)) is not None)):
        assert batch is not None
        yield batch


def _length(batches: Iterable[Batch]) -> int:
    """How many there are; −1 if that cannot be told. A DataLoader has a length, even where its data has none."""
    try:
        return len(batches) if isinstance(batches, Sized) else -1
    except TypeError:
        return -1
