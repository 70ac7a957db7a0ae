"""A run on one rank: join the world, build model and strategy, train epoch by epoch, save checkpoints."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinwire.comm.base import Comm
from thinwire.comm.join import join
from thinwire.comm.secret import forget_variable
from thinwire.comm.world import find_world
from thinwire.common.batches import num_samples_of, tensors_of
from thinwire.common.fetching import on_device
from thinwire.common.messages import print_line
from thinwire.config import RunConfig
from thinwire.data import Batch, derive_seed, to_device
from thinwire.errors import PeerLost
from thinwire.optim import LearningRateWatch
from thinwire.run.batches import End, TrainingClock, epoch_batches
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.length import Due, due_after
from thinwire.run.meters import Meters
from thinwire.run.network import LinkReport
from thinwire.run.position import Position, load_newest_checkpoint, run_state
from thinwire.run.progress import NoProgress, Progress, ProgressBar, ProgressFile
from thinwire.run.recorder import Recorder, refuse_taken
from thinwire.run.records import RunFolder
from thinwire.run.setup import find_length, identity, loader_of, optimizer_of, recipe_of
from thinwire.run.startup import (
    on_rank_0,
    open_folder,
    seed_everything,
    suit_patience,
    use_device,
    with_defaults,
)
from thinwire.run.step_losses import StepLosses
from thinwire.run.summary import num_parameters
from thinwire.strategies.finite import CHECK_EVERY_STEPS, not_finite_error
from thinwire.strategies.prepare import make_strategy
from thinwire.tasks.loading import load_task, with_metric


def run_rank(config: RunConfig, link: LinkReport = LinkReport(), progress_file: Path | None = None) -> dict[str, Any]:
    """Train as one rank of the world that this process is in; returns the summary.

    With `progress_file`, progress goes to that file instead of the terminal.
    """
    device = use_device(config, find_world())
    backend = "gloo" if link.on_hosts else None  # nccl would not use the hosts' network
    with join(backend, config.patience, device, config.iface, config.secret_file) as comm:
        forget_variable()
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and config.out is not None:
            has_begun = on_rank_0(comm, RunFolder(config.out).config.exists)
            config = config.model_copy(update={"resume": has_begun})
        return Run(config, comm, device, link, progress_file).run()


class Run:
    """A run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        comm: Comm,
        device: torch.device,
        link: LinkReport = LinkReport(),
        progress_file: Path | None = None,
    ) -> None:
        self.start_time = time.monotonic()
        self.meters = Meters(comm, device, link)
        self.comm, self.device, self.progress_file = comm, device, progress_file
        seed_everything(config.seed)
        self.task = with_metric(load_task(config.task, config.data, config.seed), config.metric)
        self.config = with_defaults(config, self.task, comm.size)
        self.length = find_length(self.config, self.task, comm.size)
        seed_everything(config.seed)
        model = self.task.build_model(config.model).to(device)
        size = num_parameters(model)
        suit_patience(config, comm, model, link.rate_mbit)
        self.learning_rate = LearningRateWatch(optimizer_of(self.config))
        self.strategy = make_strategy(
            self.config.strategy, model, recipe_of(self.config, self.task, self.length, self.learning_rate), comm
        )  # fmt: skip
        self.loader = loader_of(
            self.config, self.task, comm.size, self.strategy.shard, None if self.strategy.checks_targets else device
        )  # fmt: skip
        self.task = replace(self.task, test=on_device(self.task.test, device, self.task.collate_fn))
        self.generator = torch.Generator(device)  # of the augmentation; seeded anew for each batch
        seed_everything(derive_seed(config.seed, comm.rank))  # dropout differs between ranks
        self.folder = open_folder(config, comm)
        self.recorder = Recorder(
            self.config, self.task, comm, self.strategy, self.meters, self.folder, size, self.length
        )  # fmt: skip
        self.metric_key = f"test_{self.recorder.metric.name}"
        about = identity(self.config, model, self.strategy, self.loader)
        kept, warn = self.folder.checkpoints, self._warn
        self.checkpoints = Checkpoints(kept, comm, about, config.keep, warn, sweeps=self.folder.is_held)
        self.at = Position()
        self.losses = StepLosses()  # of steps that are not yet in self.at.loss_sum
        self.progress: Progress = NoProgress()

    def run(self) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if the run is resumed; returns the summary."""
        try:
            if self.config.resume:
                self._resume()
            self.recorder.begin()
            if self.comm.rank == 0 or not self.folder.config.exists():  # the second: on a machine with its own disk
                self.folder.save_config(self.config)
            if self.comm.rank == 0:
                about = (self.recorder.metric.name, self.length.num_steps, self.at.step, self.length.num_epochs)
                file = self.progress_file
                self.progress = ProgressFile(file, *about) if file else ProgressBar(*about)
            while not self.length.is_reached(self.at) and not self._is_out_of_time():
                self._train_epoch()
            self.progress.close()
            return self.recorder.at_end(self.at, self._seconds, show=self.progress_file is None)
        except Exception as error:
            if not isinstance(error, PeerLost):  # else the rank that failed does it
                self.folder.remove_if_empty()
            raise
        finally:
            self.progress.close()
            self.recorder.close()
            self.folder.release()

    # ---- training

    def _train_epoch(self) -> None:
        self.clock = TrainingClock(self.at)
        epoch_length = self.length.epoch_length(self.at)
        self.strategy.begin_epoch(epoch_length and epoch_length - self.at.first_batch)
        self.strategy.set_shard(self.loader)
        end: End = "complete"
        for i, (read, end) in enumerate(epoch_batches(self.loader, self.at, self.length, self.comm)):
            if self.at.epoch in self.strategy.timeline_epochs:
                self.meters.record_some_steps(i)
            with self.meters.timeline.step(self.at.step + 1):
                batch = self._transformed(read)
                self.losses.add(self.strategy.step(batch), self.strategy.loss_parts)
            num_samples = num_samples_of(read if tensors_of(read) else batch)  # text is tensors only when transformed
            self._advance(
                batch=self.at.batch + 1, step=self.at.step + 1, train_seconds=self.clock.seconds(),
                samples=self.at.samples + num_samples * self.strategy.shard.count,
            )  # fmt: skip
            if end == "no":
                self._after_step(due_after(self.config, self.at, is_epoch_end=False))
        self._end_epoch(is_complete=end == "complete")

    def _after_step(self, due: Due) -> None:
        """Do what is due between two steps of an epoch."""
        if due.checkpoint or due.has_row or len(self.losses) >= CHECK_EVERY_STEPS or self.progress.is_due():
            self._read_losses()
        if due.has_row:
            self._advance(train_seconds=self.clock.seconds())  # now that the GPU is done
        with self.clock.stopped():
            if due.has_row:
                speed = self.clock.speed_since_row(self.at)
                row = self.recorder.in_epoch(self.at, self._seconds(), speed, due, self._logged(due))
                best = self.at.tested(row.get(self.metric_key), self.recorder.metric).best
                self._advance(best=best)
                self.progress.row(row)
            if due.checkpoint:
                self._save_checkpoint()

    def _end_epoch(self, is_complete: bool) -> None:
        """Let the strategy end its epoch; test, record and save. An epoch that --steps ended can still go on later."""
        self.meters.timeline.pause()
        with self.meters.timeline.step(self.at.step):
            self.strategy.end_epoch()
        self._read_losses()
        self._advance(train_seconds=self.clock.seconds())  # now that the GPU is done
        due = due_after(self.config, self.at, is_epoch_end=True)
        row, by_rank = self.recorder.after_epoch(
            self.at, self._seconds, self.clock.speed(self.at), due, self._logged(due)
        )  # fmt: skip
        self.at = self.at.tested(row.get(self.metric_key), self.recorder.metric)
        new_epoch = {"batch": 0, "first_batch": 0, "loss_sum": 0.0, "part_sums": {}, "part_steps": {}}
        after = {"epoch": self.at.epoch + 1, **new_epoch} if is_complete else {"first_batch": self.at.batch}
        self._advance(**after, epochs_seconds=by_rank[0]["train_seconds"])
        self.progress.row(row)
        self._save_checkpoint()

    def _logged(self, due: Due) -> dict[str, float | None]:
        """What a row has if a log is due: the mean loss since the last one, and the learning rate. Collective."""
        if not due.log:
            return {}
        loss = self.recorder.mean_loss(self.at.unlogged_loss, self.at.unlogged_steps)
        self._advance(unlogged_loss=0.0, unlogged_steps=0)
        return {"loss": loss, "lr": self.learning_rate.last}

    def _read_losses(self) -> None:
        """Add the latest losses to the sum, raise RunError if one is not finite, show progress. Waits for a GPU."""
        if not self.losses:
            return
        losses, parts = self.losses.take()
        refuse_taken(parts)
        if not losses.isfinite().all():
            first = int((~losses.isfinite()).nonzero()[0])
            raise not_finite_error(self.at.step - len(losses) + first + 1, losses[first].item())
        self.at = self.at.with_losses(losses.sum().item(), len(losses), parts)
        if self.progress.is_due():
            loss = losses[-1].item() if self.strategy.sees_loss else None
            self.progress.step(self.at.step, loss, self.clock.speed(self.at), self.comm.ledger.wire_bytes)

    def _transformed(self, batch: Batch) -> Batch:
        """A batch as the model gets it, with augmentation that depends on (seed, epoch, batch, shard) alone."""
        seed = derive_seed(self.config.seed, self.at.epoch, self.at.batch, self.strategy.shard.index)
        moved = self.task.batch_loss.map_inputs(batch, lambda inputs: to_device(inputs, self.device))
        return self.task.transformed(moved, self.generator.manual_seed(seed))

    # ---- position and checkpoints

    def _resume(self) -> None:
        position = load_newest_checkpoint(
            self.checkpoints, self.strategy, self.meters, self.folder, self.comm, self.length.refuse_less_than
        )  # fmt: skip
        if position is None:
            self._print_on_rank_0(f"{self.folder.path} has no usable checkpoint; starting from the beginning")
            return
        self.at = position
        self._print_on_rank_0(f"resuming at step {self.at.step} of {self.length.num_steps}")

    def _save_checkpoint(self) -> None:
        self.checkpoints.save(
            self.at.step, lambda: run_state(self.at, self._seconds(), self.strategy, self.meters)
        )  # fmt: skip
        self.recorder.after_checkpoint()

    def _is_out_of_time(self) -> bool:
        return self.config.minutes is not None and self.at.epochs_seconds >= 60 * self.config.minutes

    def _advance(self, **changes: Any) -> None:
        self.at = replace(self.at, **changes)

    def _seconds(self) -> float:
        return self.at.seconds + time.monotonic() - self.start_time

    def _warn(self, text: str) -> None:
        print_line(f"rank {self.comm.rank}: {text}")

    def _print_on_rank_0(self, text: str) -> None:
        if self.comm.rank == 0:
            print_line(text)
