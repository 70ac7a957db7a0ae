"""Take part in an elastic run, with a folder for the record and checkpoints; and again, if it was left behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.comm.addresses import AUTO, gloo_interface
from thinwire.comm.join import own_node_key, wait_for_gloo_threads
from thinwire.comm.ledger import Ledger
from thinwire.comm.patience import patience_seconds
from thinwire.comm.process_groups import without_grace
from thinwire.common.messages import print_line
from thinwire.elastic.groups import wait_for_closing
from thinwire.elastic.job import Job
from thinwire.elastic.keeper import find_place, find_store
from thinwire.elastic.member import Member
from thinwire.elastic.membership import LeftBehind, Membership
from thinwire.elastic.notes import Notes, StoreLost
from thinwire.elastic.record import Record, Row
from thinwire.elastic.shares import Position
from thinwire.elastic.trainee import Trainee, solo
from thinwire.errors import RunError, Stopped, UsageError
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.startup import fingerprint

CHECKPOINT_SECONDS = 10.0  # at most one checkpoint in so many
PATIENCE = "30s"


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
    return take_part(Trainee(job), at, out, resume, min_ranks, patience, iface, secret_file, keep, after_round)


def take_part(
    trainee: Trainee, at: str, out: Path | None, resume: bool, min_ranks: int, patience: float | str, iface: str,
    secret_file: Path | None, keep: int, after_round: Callable[[Row, Member], None],
) -> Taken:  # fmt: skip
    """What `train_elastic` does, with a model that was made already."""
    seconds, job = patience_seconds(patience), trainee.job
    record = Record() if out is None else Record.read(out / "membership.jsonl")
    saved = None if out is None else _Saved(out, job, trainee, keep)
    position, claim = Position(), None
    if resume and saved is not None:
        position, claim = saved.load(trainee, record)
    elif out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found, is_finished = find_store(at, secret_file, iface), False
    try:
        _check_job(found.notes, identity(job, trainee))
        with without_grace(), gloo_interface(find_place(at)[0], iface):
            ledger = Ledger()
            while True:
                member = _member(found.notes, trainee, record, position, seconds, claim, ledger)
                member.after_round = partial(_after, member, saved, after_round)
                try:
                    member.run(min_ranks)
                    is_finished = True
                    break
                except LeftBehind as error:
                    print_line(f"{error}; it comes again as a new rank")
                    position, claim = Position(), None  # what it has trained since does not count
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
    }  # fmt: skip


def _check_job(notes: Notes, own: dict[str, Any]) -> None:
    """Raise UsageError if the run at this address trains something else."""
    there = notes.decide("job", own)
    different = [key for key in own if there.get(key) != own[key]]
    if different:
        what = ", ".join(f"{key} {there.get(key)} there, {own[key]} here" for key in different)
        raise UsageError(f"the run at this address is another one ({what}); give the same settings on every rank")


def _member(
    notes: Notes, trainee: Trainee, record: Record, at: Position, patience: float, claim: int | None, ledger: Ledger
) -> Member:
    about = {"name": socket.gethostname(), "host": own_node_key()[0], "pid": os.getpid()}
    membership = Membership(notes.another(), about, patience, claim)
    member = Member(membership, trainee, record, at, notes.another())
    member.say, member.ledger = print_line, ledger
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

    def __init__(self, out: Path, job: Job, trainee: Trainee, keep: int) -> None:
        self._checkpoints = Checkpoints(out / "checkpoints", solo(), identity(job, trainee), keep, print_line)
        self._at = -CHECKPOINT_SECONDS

    def is_due(self) -> bool:
        """Whether the last one is old enough."""
        return time.monotonic() - self._at >= CHECKPOINT_SECONDS

    def save(self, member: Member) -> None:
        """Save this rank's state, at the end of a round."""
        state = {"trainee": member.trainee.state_dict(), "at": asdict(member.at), "id": member.id}
        self._checkpoints.save(member.at.round, lambda: state)
        self._at = time.monotonic()

    def load(self, trainee: Trainee, record: Record) -> tuple[Position, int | None]:
        """Load the newest state, and drop rounds after it; returns the position and the id that this rank had."""
        found = self._checkpoints.load_latest()
        rows = [row for row in record.rows if found is not None and row.round < found[0]]
        record.replace(rows)
        if found is None:
            return Position(), None
        trainee.load_state_dict(found[1]["trainee"])
        return Position(**found[1]["at"]), found[1]["id"]
