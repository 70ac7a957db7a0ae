"""Take part in an elastic run, with a folder for the record and checkpoints; and again, if it was left behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from thinwire.comm.addresses import AUTO, gloo_address, gloo_interface
from thinwire.comm.join import own_node_key, wait_for_gloo_threads
from thinwire.comm.ledger import Ledger
from thinwire.comm.patience import patience_seconds
from thinwire.comm.process_groups import without_grace
from thinwire.common.messages import print_line
from thinwire.elastic.groups import wait_for_closing
from thinwire.elastic.job import Job
from thinwire.elastic.keeper import find_place, find_store
from thinwire.elastic.meeting import LeftBehind
from thinwire.elastic.member import Member
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes, StoreLost
from thinwire.elastic.record import Record, Row
from thinwire.elastic.shares import Position
from thinwire.elastic.trainee import Trainee, solo
from thinwire.errors import RunError, Stopped, UsageError
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.records import RunFolder
from thinwire.run.startup import fingerprint
from thinwire.strategies.learner import IMPLEMENTATION

CHECKPOINT_SECONDS = 10.0  # at most one checkpoint in so many
PATIENCE = "30s"


class Brought(NamedTuple):
    """What a rank has from a checkpoint, if it has one."""

    at: Position = Position()
    id: int = -1  # that it had then
    others: int = 0  # ranks that made the round before, with itself


class Taken:
    """A run that this rank took part in: the model that all agreed on, the record, and what this rank sent."""

    def __init__(self, model: nn.Module, record: Record, ledger: Ledger) -> None:
        self.model, self.record, self.ledger = model, record, ledger


def train_elastic(
    job: Job, at: str, *, out: Path | None = None, resume: bool = False, min_ranks: int = 1,
    patience: float | str = PATIENCE, iface: str = AUTO, secret_file: Path | None = None, keep: int = 2,
    after_round: Callable[[Row, Member], None] = lambda row, member: None,
) -> Taken:  # fmt: skip
    """Train as one rank of an elastic run, from now to its end; any rank may come and go meanwhile.

    All ranks call it with the same job. `at` is HOST:PORT: the first rank on that machine opens the store there. With a
    secret, in a file or in THINWIRE_SECRET, all ranks must know it. The run begins once `min_ranks` are here. A rank
    whose heart stands still for `patience` is lost; after a connection broke, a fifth of that is enough. With `out`, a
    folder of this rank alone, it keeps the record and checkpoints, and can `resume`.

    >>> import torch, thinwire as tw
    >>> data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.zeros(32, 2))
    >>> job = tw.Job("diloco(every=2)", lambda: torch.nn.Linear(4, 2), data, torch.nn.functional.mse_loss,
    ...              lambda parameters: torch.optim.SGD(parameters, 0.1), batch_size=8, epochs=1)
    >>> run = tw.train_elastic(job, at="127.0.0.1:29417")  # doctest: +SKIP
    >>> [row.members for row in run.record.rows]  # doctest: +SKIP
    [[0], [0]]
    """
    if min_ranks < 1:
        raise UsageError(f"train_elastic: min_ranks={min_ranks}; possible: 1 or more")
    trainee = Trainee(job)
    with ExitStack() as held:
        if (folder := None if out is None else RunFolder(out)) is not None:
            folder.hold()
            held.callback(folder.release)
        return take_part(trainee, at, folder, resume, min_ranks, patience, iface, secret_file, keep, after_round)


def take_part(
    trainee: Trainee, at: str, folder: RunFolder | None, resume: bool, min_ranks: int, patience: float | str,
    iface: str, secret_file: Path | None, keep: int, after_round: Callable[[Row, Member], None], first_does: str = "",
) -> Taken:  # fmt: skip
    """What `train_elastic` does, with a model that was made already and a folder that is held."""
    seconds, job, out = patience_seconds(patience), trainee.job, None if folder is None else folder.path
    record = Record() if folder is None else Record.read(folder.membership)
    about, brought, saved = identity(job, trainee), Brought(), None
    if folder is not None:
        saved = _Saved(folder, about, keep, resume)
        brought = saved.load(trainee, record) if resume else brought
    found, is_finished = find_store(at, secret_file, iface), False
    try:
        _check_job(found.notes, about)
        with without_grace(), gloo_interface(find_place(at)[0], iface):
            ledger, address = Ledger(), gloo_address(find_place(at)[0])[1]
            while True:
                member = _member(found.notes, address or "", trainee, record, brought, seconds, ledger)
                member.after_round, member.first_does = partial(_after, member, saved, after_round), first_does
                member.on_state = member.on_state if saved is None else partial(saved.set_aside, record)
                try:
                    member.run(min_ranks)
                    is_finished = True
                    break
                except LeftBehind as error:
                    print_line(f"{error}; it comes again as a new rank")
                    trainee.begin_anew()  # what it has trained since the last checkpoint does not count
                    brought = Brought() if saved is None else saved.load(trainee, record)
    except StoreLost as error:
        raise RunError(f"{error}; all ranks end. {_how_to_go_on(at, out)}") from error
    except RunError as error:
        kind = Stopped if isinstance(error, Stopped) else RunError
        raise kind(f"{error}. {_how_to_go_on(at, out)}") from error
    finally:
        wait_for_closing()
        wait_for_gloo_threads()
        found.close(is_finished)
    if saved is not None:
        saved.save(member)
    return Taken(trainee.model, record, ledger)


def identity(job: Job, trainee: Trainee) -> dict[str, Any]:
    """What must be the same on all ranks, and in a checkpoint."""
    return {
        "strategy": job.strategy, "batch_size": job.batch_size, "epochs": job.epochs, "seed": job.seed,
        "samples": trainee.num_samples, "clip_norm": job.clip_norm, "accumulate": job.accumulate,
        "autocast": job.autocast, "weights": fingerprint(trainee.model),
        "optimizer": _settings(trainee.learner.optimizer),
        "schedule": [round(job.schedule(done / 8 * job.epochs, job.epochs), 6) for done in range(9)],
    }  # fmt: skip


def _settings(optimizer: Optimizer) -> str:
    """An optimizer's type and options, as text."""
    groups = [
        ", ".join(f"{key}={value}" for key, value in group.items() if key not in ("params", *IMPLEMENTATION))
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _refuse_old_run(out: Path) -> None:
    """Raise UsageError if a folder for a new run has the record or checkpoints of another one."""
    for name in ("membership.jsonl", "checkpoints"):
        if (out / name).exists():
            raise UsageError(
                f"out={str(out)!r} has {name} of another run; resume=True goes on with that, else give another folder"
            )


def _check_job(notes: Notes, own: dict[str, Any]) -> None:
    """Raise UsageError if the run at this address trains something else."""
    there = notes.decide("job", own)
    different = [key for key in own if there.get(key) != own[key]]
    if different:
        what = ", ".join(f"{key} {there.get(key)} there, {own[key]} here" for key in different)
        raise UsageError(f"the run at this address is another one ({what}); give the same settings on every rank")


def _member(
    notes: Notes, address: str, trainee: Trainee, record: Record, brought: Brought, patience: float, ledger: Ledger
) -> Member:
    about = {"name": socket.gethostname(), "host": own_node_key()[0], "pid": os.getpid(), "address": address}
    membership = Membership(notes.another(), about, patience, None if brought.id < 0 else brought.id)
    member = Member(membership, trainee, record, brought.at, notes.another())
    member.say, member.ledger, member.was, member.others = print_line, ledger, brought.id, brought.others
    return member


def _after(member: Member, saved: _Saved | None, then: Callable[[Row, Member], None], row: Row) -> None:
    if saved is not None and saved.is_due():
        saved.save(member)
    then(row, member)


def _how_to_go_on(at: str, out: Path | None) -> str:
    if out is None or not any((out / "checkpoints").glob("*/rank-*.json")):
        return "Nothing was saved here"
    return f"To go on from the last checkpoint, on each machine: thinwire train --elastic {at} --out {out} --resume"


class _Saved:
    """The checkpoints of this rank, on its own disk."""

    def __init__(self, folder: RunFolder, about: dict[str, Any], keep: int, resume: bool) -> None:
        if not resume:
            _refuse_old_run(folder.path)
            folder.path.mkdir(parents=True, exist_ok=True)
        self._checkpoints = Checkpoints(folder.checkpoints, solo(), about, keep, print_line, sweeps=folder.is_held)
        self._at = -CHECKPOINT_SECONDS

    def is_due(self) -> bool:
        """Whether the last one is old enough."""
        return time.monotonic() - self._at >= CHECKPOINT_SECONDS

    def save(self, member: Member) -> None:
        """Save this rank's state, at the end of a round."""
        state = {"trainee": member.trainee.state_dict(), "at": asdict(member.at), "id": member.id}
        self._checkpoints.save(member.at.round, lambda: state)
        self._at = time.monotonic()

    def load(self, trainee: Trainee, record: Record) -> Brought:
        """Load the newest state, and drop rounds after it."""
        found = self._checkpoints.load_latest()
        rows = [row for row in record.rows if found is not None and row.round < found[0]]
        record.replace(rows)
        if found is None:
            return Brought()
        trainee.load_state_dict(found[1]["trainee"])
        return Brought(Position(**found[1]["at"]), found[1]["id"], len(rows[-1].members) if rows else 0)

    def set_aside(self, record: Record, rows: Sequence[Row]) -> None:
        """Keep only checkpoints of rounds that the run has, too, before this rank goes on with its state and rows."""
        both = zip(record.rows, rows, strict=False)
        known = next((i for i, (own, row) in enumerate(both) if own != row), min(len(record.rows), len(rows)))
        self._checkpoints.set_aside_after(rows[known - 1].round + 1 if known else 0)
        self._at = -CHECKPOINT_SECONDS
