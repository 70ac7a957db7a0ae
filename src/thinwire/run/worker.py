"""One rank's run: connect, build, train epoch by epoch, save checkpoints."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.join import join
from thinwire.comm.world import find_world
from thinwire.common.messages import print_line
from thinwire.config import MAY_CHANGE, RunConfig
from thinwire.data import Loader, derive_seed
from thinwire.errors import PeerLost
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.meters import Meters
from thinwire.run.network import LinkReport
from thinwire.run.position import Position, load_position, state_of_run
from thinwire.run.progress import Progress, Reported, Shown, Silent
from thinwire.run.recorder import Recorder
from thinwire.run.records import RunFolder
from thinwire.run.startup import agree, choose_device, fingerprint, open_folder, seed_everything, with_defaults
from thinwire.run.summary import count
from thinwire.strategies.base import Strategy
from thinwire.strategies.learner import CHECK_EVERY_STEPS, Recipe, not_finite
from thinwire.tasks.loading import load_task


def run_rank(config: RunConfig, link: LinkReport = LinkReport(), progress_file: Path | None = None) -> dict[str, Any]:
    """Train as one rank of the world that this process is in; returns the summary.

    With `progress_file`, progress goes to that file instead of the terminal.
    """
    world = find_world()
    device = choose_device(config, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:
        share = len(os.sched_getaffinity(0)) // (world.local_size if world else 1)
        torch.set_num_threads(max(1, share - 1))  # and one for the network
    backend = "gloo" if link.on_hosts else None  # nccl would find a way round the hosts' network
    with join(backend, device=device) as comm:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and config.out is not None:
            begun = agree(comm, RunFolder(config.out).config.exists)
            config = config.model_copy(update={"resume": begun})
        return Run(config, comm, device, link, progress_file).run()


class Run:
    """A run as one rank sees it."""

    def __init__(
        self,
        config: RunConfig,
        comm: Comm,
        device: torch.device,
        link: LinkReport = LinkReport(),
        progress_file: Path | None = None,
    ) -> None:
        self.clock = time.monotonic()
        self.meters = Meters(comm, device, link)
        self.comm = comm
        self.device = device
        self.progress_file = progress_file
        seed_everything(config.seed)
        self.task = load_task(config.task, config.data, config.seed)
        self.config = with_defaults(config, self.task, comm)
        seed_everything(config.seed)
        model = self.task.build_model(config.model).to(device)
        num_parameters = count(model)
        self.strategy = self._strategy(model)
        shard = self.strategy.shard
        self.loader = Loader(self.task.train, shard, self._get("batch_size"), seed=config.seed, ranks=comm.size)
        self.num_steps = self._get("epochs") * len(self.loader)
        seed_everything(derive_seed(config.seed, comm.rank))  # dropout differs between ranks
        self.folder = open_folder(config, comm)
        self.recorder = Recorder(
            self.config, self.task, comm, self.strategy, self.meters, self.folder, num_parameters
        )  # fmt: skip
        identity = {
            **self.config.model_dump(mode="json", exclude=MAY_CHANGE),
            "samples": self.loader.num_samples,
            "weights": fingerprint(model),
            **({"shards": shard.count} if shard.count < comm.size else {}),  # earlier versions took smaller batches
        }
        self.checkpoints = Checkpoints(self.folder.checkpoints, comm, identity, config.keep, self._warn)
        self.at = Position()
        self.losses: list[Tensor] = []  # not yet looked at
        self.progress: Progress = Silent()

    def run(self) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one to resume."""
        try:
            if self.config.resume:
                self._resume()
            if self.comm.rank == 0 or not self.folder.config.exists():  # or: this host has a disk of its own
                self.folder.save_config(self.config)
            if self.comm.rank == 0:
                about = (self.task.metric, self.num_steps, self.at.step, self._get("epochs"))
                self.progress = Reported(self.progress_file, *about) if self.progress_file else Shown(*about)
            while self.at.epoch < self._get("epochs") and not self._out_of_time():
                self._epoch()
        except Exception as error:
            if not isinstance(error, PeerLost):  # who failed does it
                self.folder.forget_if_empty()
            raise
        finally:
            self.progress.close()
        return self.recorder.at_end(self.at, self._seconds(), show=self.progress_file is None)

    # ---- training

    def _strategy(self, model: nn.Module) -> Strategy:
        factor = registry.build("schedules", self._get("schedule"))
        recipe = Recipe(
            loss=self.task.loss,
            optimizer=registry.build("optimizers", self._get("optimizer"), self._get("lr")),
            schedule=lambda step: factor((step + 0.5) / len(self.loader), self._get("epochs")),
            clip_norm=self.config.clip_norm,
            accumulate=self.config.accumulate,
            autocast=self.config.autocast,
            epochs=self._get("epochs"),
        )
        strategy: Strategy = registry.build("strategies", self.config.strategy, model, recipe, self.comm)
        return strategy

    def _epoch(self) -> None:
        begin = time.monotonic() - self.at.train_seconds
        seconds, samples = self.at.train_seconds, self.at.samples
        every = self.config.checkpoint_every

        def speed() -> float:
            return (self.at.samples - samples) / (self.at.train_seconds - seconds)

        self.strategy.begin_epoch(len(self.loader))
        for i, (inputs, targets) in enumerate(self.loader.batches(self.at.epoch, start=self.at.batch)):
            if self.at.epoch == 0:
                self.meters.keep_some(i)
            with self.meters.timeline.step(self.at.step + 1):
                self.losses.append(self.strategy.step((self._transformed(inputs), targets)))
            self._advance(
                batch=self.at.batch + 1, step=self.at.step + 1, train_seconds=time.monotonic() - begin,
                samples=self.at.samples + len(inputs) * self.strategy.shard.count,
            )  # fmt: skip
            save = every > 0 and self.at.step % every == 0 and self.at.batch < len(self.loader)
            if save or len(self.losses) >= CHECK_EVERY_STEPS or self.progress.due():
                self._look(speed())
            if save:
                pause = time.monotonic()
                self._save_checkpoint()
                begin += time.monotonic() - pause  # that was no training
        self.meters.timeline.pause()
        with self.meters.timeline.step(self.at.step):
            self.strategy.end_epoch()
        self._look(speed())
        self._advance(train_seconds=time.monotonic() - begin)  # a GPU may have been at work until now
        row, everyone = self.recorder.after_epoch(self.at, self._seconds(), speed())
        value = row[f"test_{self.task.metric}"]
        self._advance(
            epoch=self.at.epoch + 1, batch=0, loss_sum=0.0, value=value, best=self._better(value),
            epochs_seconds=everyone[0]["train_seconds"],
        )  # fmt: skip
        self._save_checkpoint()
        self.progress.epoch(row)

    def _look(self, samples_per_second: float) -> None:
        """Add up the losses since the last look, stop on one that is not finite, show progress."""
        if not self.losses:
            return
        losses = torch.stack(self.losses).double().cpu()
        self.losses.clear()
        if not losses.isfinite().all():
            first = int((~losses.isfinite()).nonzero()[0])
            raise not_finite(self.at.step - len(losses) + first + 1, losses[first].item())
        self._advance(loss_sum=self.at.loss_sum + losses.sum().item())
        if self.progress.due():
            loss = losses[-1].item() if self.strategy.sees_loss else None
            self.progress.step(self.at.step, loss, samples_per_second, self.comm.ledger.wire_bytes)

    def _transformed(self, inputs: Tensor) -> Tensor:
        """Inputs as the model sees them, with augmentation that depends on (seed, epoch, batch, shard) alone."""
        seed = derive_seed(self.config.seed, self.at.epoch, self.at.batch, self.strategy.shard.index)
        generator = torch.Generator(self.device).manual_seed(seed)
        return self.task.transform(inputs.to(self.device, non_blocking=True), generator)

    # ---- where it is

    def _resume(self) -> None:
        found = load_position(
            self.checkpoints, self.strategy, self.meters, self.folder, self.comm, self._get("epochs")
        )  # fmt: skip
        if found is None:
            self._say(f"{self.folder.path} has no checkpoint that can be used; starting from the beginning")
            return
        self.at = found
        self._say(f"resuming at step {self.at.step} of {self.num_steps}")

    def _save_checkpoint(self) -> None:
        self.checkpoints.save(
            self.at.step, lambda: state_of_run(self.at, self._seconds(), self.strategy, self.meters)
        )  # fmt: skip

    def _out_of_time(self) -> bool:
        return self.config.minutes is not None and self.at.epochs_seconds >= 60 * self.config.minutes

    def _advance(self, **changes: Any) -> None:
        self.at = replace(self.at, **changes)

    def _seconds(self) -> float:
        return self.at.seconds + time.monotonic() - self.clock

    def _better(self, value: float) -> float:
        pick = max if self.task.metric == "accuracy" else min
        return value if self.at.best is None else pick(self.at.best, value)

    def _get(self, name: str) -> Any:
        value = getattr(self.config, name)
        assert value is not None, name
        return value

    def _warn(self, text: str) -> None:
        print_line(f"rank {self.comm.rank}: {text}")

    def _say(self, text: str) -> None:
        if self.comm.rank == 0:
            print_line(text)
