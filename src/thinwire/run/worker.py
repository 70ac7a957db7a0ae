"""A run on one rank: join the world, build model and strategy, train epoch by epoch, save checkpoints."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.join import join
from thinwire.comm.world import find_world
from thinwire.common.fetching import on_device
from thinwire.common.messages import print_line
from thinwire.config import MAY_CHANGE, RunConfig
from thinwire.data import Loader, derive_seed
from thinwire.errors import PeerLost
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.meters import Meters
from thinwire.run.network import LinkReport
from thinwire.run.position import Position, load_newest_checkpoint, run_state
from thinwire.run.progress import NoProgress, Progress, ProgressBar, ProgressFile
from thinwire.run.recorder import Recorder
from thinwire.run.records import RunFolder
from thinwire.run.startup import fingerprint, on_rank_0, open_folder, seed_everything, use_device, with_defaults
from thinwire.run.summary import num_parameters
from thinwire.strategies.base import Strategy
from thinwire.strategies.finite import CHECK_EVERY_STEPS, not_finite_error
from thinwire.strategies.learner import Recipe
from thinwire.strategies.prepare import make_strategy
from thinwire.tasks.loading import load_task


def run_rank(config: RunConfig, link: LinkReport = LinkReport(), progress_file: Path | None = None) -> dict[str, Any]:
    """Train as one rank of the world that this process is in; returns the summary.

    With `progress_file`, progress goes to that file instead of the terminal.
    """
    device = use_device(config, find_world())
    backend = "gloo" if link.on_hosts else None  # nccl would not use the hosts' network
    with join(backend, device=device, iface=config.iface) as comm:
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
        self.comm = comm
        self.device = device
        self.progress_file = progress_file
        seed_everything(config.seed)
        self.task = load_task(config.task, config.data, config.seed)
        self.config = with_defaults(config, self.task, comm.size)
        seed_everything(config.seed)
        model = self.task.build_model(config.model).to(device)
        size = num_parameters(model)
        self.strategy = self._make_strategy(model)
        shard = self.strategy.shard
        self.loader = Loader(
            self.task.train, shard, self._setting("batch_size"), seed=config.seed, ranks=comm.size,
            device=None if self.strategy.checks_targets else device,
        )  # fmt: skip
        self.task = replace(self.task, test=on_device(self.task.test, device))
        self.generator = torch.Generator(device)  # of the augmentation; seeded anew for each batch
        self.num_steps = self._setting("epochs") * len(self.loader)
        seed_everything(derive_seed(config.seed, comm.rank))  # dropout differs between ranks
        self.folder = open_folder(config, comm)
        self.recorder = Recorder(
            self.config, self.task, comm, self.strategy, self.meters, self.folder, size
        )  # fmt: skip
        self.checkpoints = Checkpoints(
            self.folder.checkpoints, comm, self._identity(model), config.keep, self._warn
        )  # fmt: skip
        self.at = Position()
        self.losses: list[Tensor] = []  # of steps that are not yet in self.at.loss_sum
        self.progress: Progress = NoProgress()

    def run(self) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if the run is resumed; returns the summary."""
        try:
            if self.config.resume:
                self._resume()
            if self.comm.rank == 0 or not self.folder.config.exists():  # the second: on a machine with its own disk
                self.folder.save_config(self.config)
            if self.comm.rank == 0:
                about = (self.task.metric, self.num_steps, self.at.step, self._setting("epochs"))
                file = self.progress_file
                self.progress = ProgressFile(file, *about) if file else ProgressBar(*about)
            while self.at.epoch < self._setting("epochs") and not self._is_out_of_time():
                self._train_epoch()
        except Exception as error:
            if not isinstance(error, PeerLost):  # else the rank that failed does it
                self.folder.remove_if_empty()
            raise
        finally:
            self.progress.close()
        return self.recorder.at_end(self.at, self._seconds, show=self.progress_file is None)

    # ---- training

    def _make_strategy(self, model: nn.Module) -> Strategy:
        factor = registry.build("schedules", self._setting("schedule"))
        recipe = Recipe(
            loss=self.task.loss,
            optimizer=registry.build("optimizers", self._setting("optimizer"), self._setting("lr")),
            schedule=lambda step: factor((step + 0.5) / len(self.loader), self._setting("epochs")),
            clip_norm=self.config.clip_norm,
            accumulate=self.config.accumulate,
            autocast=self.config.autocast,
            epochs=self._setting("epochs"),
            compile=self.config.compile,
        )
        return make_strategy(self.config.strategy, model, recipe, self.comm)

    def _train_epoch(self) -> None:
        begin = time.monotonic() - self.at.train_seconds
        seconds, samples = self.at.train_seconds, self.at.samples
        every = self.config.checkpoint_every

        def speed() -> float:
            return (self.at.samples - samples) / (self.at.train_seconds - seconds)

        self.strategy.begin_epoch(len(self.loader))
        self.strategy.set_shard(self.loader)
        with closing(self.loader.batches(self.at.epoch, start=self.at.batch)) as batches:
            for i, (inputs, targets) in enumerate(batches):
                if self.at.epoch in self.strategy.timeline_epochs:
                    self.meters.record_some_steps(i)
                with self.meters.timeline.step(self.at.step + 1):
                    self.losses.append(self.strategy.step((self._transformed(inputs), targets)))
                self._advance(
                    batch=self.at.batch + 1, step=self.at.step + 1, train_seconds=time.monotonic() - begin,
                    samples=self.at.samples + len(inputs) * self.strategy.shard.count,
                )  # fmt: skip
                is_checkpoint = every > 0 and self.at.step % every == 0 and self.at.batch < len(self.loader)
                if is_checkpoint or len(self.losses) >= CHECK_EVERY_STEPS or self.progress.is_due():
                    self._read_losses(speed())
                if is_checkpoint:
                    before = time.monotonic()
                    self._save_checkpoint()
                    begin += time.monotonic() - before  # not part of train_seconds
        self.meters.timeline.pause()
        with self.meters.timeline.step(self.at.step):
            self.strategy.end_epoch()
        self._read_losses(speed())
        self._advance(train_seconds=time.monotonic() - begin)  # now that the GPU is done
        row, by_rank = self.recorder.after_epoch(self.at, self._seconds, speed())
        self.at = self.at.tested(row.get(f"test_{self.task.metric}"), self.task.metric)
        self._advance(
            epoch=self.at.epoch + 1, batch=0, loss_sum=0.0, epochs_seconds=by_rank[0]["train_seconds"]
        )  # fmt: skip
        self._save_checkpoint()
        self.progress.epoch(row)

    def _read_losses(self, samples_per_second: float) -> None:
        """Add the latest losses to the sum, raise RunError if one is not finite, show progress. Waits for a GPU."""
        if not self.losses:
            return
        losses = torch.stack(self.losses).double().cpu()
        self.losses.clear()
        if not losses.isfinite().all():
            first = int((~losses.isfinite()).nonzero()[0])
            raise not_finite_error(self.at.step - len(losses) + first + 1, losses[first].item())
        self._advance(loss_sum=self.at.loss_sum + losses.sum().item())
        if self.progress.is_due():
            loss = losses[-1].item() if self.strategy.sees_loss else None
            self.progress.step(self.at.step, loss, samples_per_second, self.comm.ledger.wire_bytes)

    def _transformed(self, inputs: Tensor) -> Tensor:
        """The model's inputs, with augmentation that depends on (seed, epoch, batch, shard) alone."""
        seed = derive_seed(self.config.seed, self.at.epoch, self.at.batch, self.strategy.shard.index)
        return self.task.transform(inputs.to(self.device, non_blocking=True), self.generator.manual_seed(seed))

    # ---- position and checkpoints

    def _identity(self, model: nn.Module) -> dict[str, Any]:
        """What a checkpoint must have been made with."""
        shards, ranks = self.strategy.shard.count, self.comm.size
        new = set() if self.config.compile else {"compile"}  # a setting that earlier versions lack
        return {
            **self.config.model_dump(mode="json", exclude=MAY_CHANGE | new),
            "samples": self.loader.num_samples,
            "weights": fingerprint(model),
            **({"shards": shards} if shards < ranks else {}),  # earlier versions had smaller batches
        }

    def _resume(self) -> None:
        position = load_newest_checkpoint(
            self.checkpoints, self.strategy, self.meters, self.folder, self.comm, self._setting("epochs")
        )  # fmt: skip
        if position is None:
            self._print_on_rank_0(f"{self.folder.path} has no usable checkpoint; starting from the beginning")
            return
        self.at = position
        self._print_on_rank_0(f"resuming at step {self.at.step} of {self.num_steps}")

    def _save_checkpoint(self) -> None:
        self.checkpoints.save(
            self.at.step, lambda: run_state(self.at, self._seconds(), self.strategy, self.meters)
        )  # fmt: skip

    def _is_out_of_time(self) -> bool:
        return self.config.minutes is not None and self.at.epochs_seconds >= 60 * self.config.minutes

    def _advance(self, **changes: Any) -> None:
        self.at = replace(self.at, **changes)

    def _seconds(self) -> float:
        return self.at.seconds + time.monotonic() - self.start_time

    def _setting(self, name: str) -> Any:
        value = getattr(self.config, name)
        assert value is not None, name
        return value

    def _warn(self, text: str) -> None:
        print_line(f"rank {self.comm.rank}: {text}")

    def _print_on_rank_0(self, text: str) -> None:
        if self.comm.rank == 0:
            print_line(text)
