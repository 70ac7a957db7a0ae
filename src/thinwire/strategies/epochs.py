"""tw.epoch: the batches of an epoch, equally many on every rank."""

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
    """Yield the batches of one epoch, equally many on every rank, and then end the epoch. Collective.

    If ranks have different numbers of batches, all ranks stop after the smallest number, and a message says so. Only
    strategies that can train without some ranks, as ist, use all batches. Ranks agree on the number once or, if some
    rank cannot know its number beforehand, before every batch. If you leave the loop early, call
    `trainer.end_epoch()` and, for a `tw.loader`, `batches.end_epoch()`. A loader whose state was loaded in mid-epoch
    continues there.

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
    number, num_done = (batches.epoch, batches.batch) if isinstance(batches, Loader) else (0, 0)
    if isinstance(batches, Loader):
        _check_positions(batches, comm)
    yield from _equally_many(trainer, batches, iterator, num_done, comm)
    trainer.end_epoch()
    if isinstance(batches, Loader) and batches.epoch == number:  # after its last batch a loader ends its epoch itself
        batches.end_epoch()


def _check_positions(loader: Loader, comm: Comm) -> None:
    """Raise UsageError if ranks continue from states of different steps: their models would differ. Collective."""
    with comm.ledger.purpose("sync"):
        own = torch.tensor([loader.epoch, loader.batch, _length(loader)])
        positions = [position.tolist() for position in comm.all_gather(own)]
    most_done = max(batch for _, batch, _ in positions)
    if any(
        (epoch, batch) != (loader.epoch, most_done if length < 0 else min(most_done, length))
        for epoch, batch, length in positions
    ):
        found = [f"rank {r} at batch {batch} of epoch {epoch}" for r, (epoch, batch, _) in enumerate(positions)]
        raise UsageError(
            f"ranks are at different positions: {', '.join(found)}; load on every rank the state of the same step "
            "(docs/library.md, Stop and resume)"
        )


def _equally_many(
    trainer: Strategy, batches: Iterable[Batch], iterator: Iterator[Batch], num_done: int, comm: Comm
) -> Iterator[Batch]:
    """The batches that are left of an epoch after `num_done`, by an iterator over all of them."""

    def gather(number: int) -> list[int]:
        with comm.ledger.purpose("sync"):
            return [int(one) for one in comm.all_gather(torch.tensor([number]))]

    num_left = _length(batches) - num_done  # negative if their number is unknown
    numbers = gather(num_left)
    least, most = min(numbers), max(numbers)
    trainer.begin_epoch(num_done + (most if trainer.allows_uneven else least) if least >= 0 else None)
    if isinstance(batches, Loader):
        trainer.set_shard(batches)
    if trainer.allows_uneven and least >= 0:
        num_given = 0
        for num_given, batch in enumerate(itertools.islice(iterator, num_left), 1):  # noqa: B007
            yield batch
        for _ in range(most - num_given):
            trainer.skip_step()
        return
    if least >= 0:
        if least < most:
            say(f"ranks have {least} to {most} batches; all stop after {least}", comm.rank, once=True)
        yield from itertools.islice(iterator, least)
        return
    while all(gather((next_batch := next(iterator, None)) is not None)):
        assert next_batch is not None
        yield next_batch


def _length(batches: Iterable[Batch]) -> int:
    """The number of batches; −1 if it is unknown. A DataLoader has `len` even if its data has none."""
    try:
        return len(batches) if isinstance(batches, Sized) else -1
    except TypeError:
        return -1
