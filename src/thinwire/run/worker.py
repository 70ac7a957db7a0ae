"""One rank: connect, build, train, evaluate, keep records."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.join import join
from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.comm.world import find_world
from thinwire.common.messages import print_line
from thinwire.common.tensor_files import save_model
from thinwire.config import MAY_CHANGE, RunConfig
from thinwire.data import Loader, derive_seed
from thinwire.errors import PeerLost, UsageError
from thinwire.exchange.assembly import StreamedModel, export
from thinwire.run import checkpoint
from thinwire.run.checkpoint import Checkpoints
from thinwire.run.evaluation import evaluate
from thinwire.run.meters import Meters
from thinwire.run.network import LinkReport
from thinwire.run.progress import Progress, Reported, Shown, Silent
from thinwire.run.records import RunFolder
from thinwire.run.startup import agree, choose_device, fingerprint, open_folder, seed_everything, with_defaults
from thinwire.run.summary import Small, count, sent_by_purpose, summarise
from thinwire.run.tables import result_table
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


@dataclass(frozen=True)
class Position:
    """Where a run is: with the states of strategy and random generators, enough to go on exactly."""

    epoch: int = 0
    batch: int = 0  # the next one of this epoch
    step: int = 0
    samples: int = 0  # trained on, by all ranks
    loss_sum: float = 0.0  # over this epoch's batches, on this rank
    value: float | None = None  # the metric after the last whole epoch
    best: float | None = None
    seconds: float = 0.0
    train_seconds: float = 0.0
    epochs_seconds: float = 0.0  # rank 0's training time at the end of the last epoch: what all ranks agree on


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
        self.num_parameters = count(model)
        self.strategy = self._strategy(model)
        self.batch_size = self._get("batch_size")
        shard = self.strategy.shard
        self.loader = Loader(self.task.train, shard, self.batch_size, seed=config.seed, ranks=comm.size)
        self.num_steps = self._get("epochs") * len(self.loader)
        seed_everything(derive_seed(config.seed, comm.rank))  # dropout differs between ranks
        self.folder = open_folder(config, comm)
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
        return self._finish()

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
                self.checkpoints.save(self.at.step, self._state)
                begin += time.monotonic() - pause  # that was no training
        self.meters.timeline.pause()
        with self.meters.timeline.step(self.at.step):
            self.strategy.end_epoch()
        self._look(speed())
        self._advance(train_seconds=time.monotonic() - begin)  # a GPU may have been at work until now
        row = self._test_and_record(speed())
        value = row[f"test_{self.task.metric}"]
        self._advance(epoch=self.at.epoch + 1, batch=0, loss_sum=0.0, value=value, best=self._better(value))
        self.checkpoints.save(self.at.step, self._state)
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

    # ---- results

    def _test_and_record(self, samples_per_second: float) -> dict[str, Any]:
        with self.comm.ledger.purpose("eval"):
            model = self.strategy.eval_model()
        tested = self._tested(model)
        with self.comm.ledger.purpose("eval"):
            seen = torch.tensor([self.at.loss_sum / self.at.batch, 1.0], dtype=torch.float64) * self.strategy.sees_loss
            loss_sum, num_seeing = self.comm.sum(seen).tolist()
        everyone = self.meters.gather(self.at.train_seconds)
        timeline = self.meters.gather_timeline() if self.at.epoch == 0 else []
        self._advance(epochs_seconds=everyone[0]["train_seconds"])
        sent = sent_by_purpose(everyone)
        where = {"step": self.at.step, "epoch": self.at.epoch + 1}
        row = {
            **where,
            "seconds": self._seconds(),
            "train_seconds": self.at.train_seconds,
            "train_loss": loss_sum / num_seeing,
            **{f"test_{name}": value for name, value in tested.items()},
            "samples_per_second": samples_per_second,
            "wire_bytes": round(bytes_of(sent) / self.comm.size),
            "training_bytes": round(bytes_of(sent, TRAINING) / self.comm.size),
            "training_bytes_between": bytes_of(sent, TRAINING, ("between",)),
            "waiting_seconds": sum(one["waiting_seconds"] for one in everyone) / self.comm.size,
            **self.strategy.status(),
        }
        if self.comm.rank == 0:
            self.folder.append(self.folder.metrics, [row])
            self.folder.append_ledger(where, [one["ledger"] for one in everyone])
            if timeline:
                self.folder.save_timeline(timeline)
        return row

    def _finish(self) -> dict[str, Any]:
        with self.comm.ledger.purpose("eval"):  # training is over
            model = self.strategy.eval_model()
            small = self._factored()
            exits = [Small(exit, self._tested(exit)[self.task.metric]) for exit in self.strategy.exits()]
        assert self.at.value is not None
        assert self.at.best is not None
        everyone = self.meters.gather(self.at.train_seconds)
        summary = summarise(
            self.config, self.task, self.meters.link, epochs=self.at.epoch, steps=self.at.step, seconds=self._seconds(),
            train_seconds=self.at.train_seconds, samples=self.at.samples,
            value=self.at.value, best=self.at.best, parameters=self.num_parameters, consolidated=model, small=small,
            exits=exits, status=self.strategy.status(),
            everyone=everyone, nodes=len(set(self.comm.nodes)), device=self.device,
        )  # fmt: skip
        if isinstance(model, StreamedModel):
            export(self.folder.sharded_model, model, replace=True)
        if self.comm.rank == 0:
            if not isinstance(model, StreamedModel):
                save_model(model, self.folder.model)
            for number, exit in enumerate(exits, 1):
                save_model(exit.model, self.folder.exit_model(number))
            if small is not None:
                save_model(small.model, self.folder.factored_model)
            where = {"step": self.at.step, "epoch": self.at.epoch}
            self.folder.append_ledger(where, [one["ledger"] for one in everyone], final=True)
            self.folder.save_summary(summary)
            if self.progress_file is None:
                console = Console()
                console.print(result_table(summary, [one["ledger"] for one in everyone]))
                console.print(f"results in {self.folder.path}", highlight=False, soft_wrap=True)
        with self.comm.ledger.purpose("checkpoint"):
            self.comm.barrier()  # nobody leaves before the results are written
        return summary

    def _factored(self) -> Small | None:
        """The same model with low-rank layers as two thin ones, where the strategy has any."""
        if not any(rank < largest for rank, largest in self.strategy.status().get("ranks", {}).values()):
            return None
        small = self.strategy.consolidate(factored=True)
        return Small(small, self._tested(small)[self.task.metric])

    def _tested(self, model: nn.Module) -> dict[str, float]:
        with self.comm.ledger.purpose("eval"):
            return evaluate(
                model, self.task, self.comm, self.device, batch_size=4 * self.batch_size, autocast=self.config.autocast
            )

    # ---- where we are

    def _state(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.state_dict(),
            "random": checkpoint.random_state(),
            "position": asdict(replace(self.at, seconds=self._seconds())),
            "meters": self.meters.state_dict(),
        }

    def _resume(self) -> None:
        before = self.meters.state_dict()
        found = self.checkpoints.load_latest()
        step, state = found or (0, None)
        at = Position(**state["position"]) if state else Position()
        if (at.epoch, at.batch) > (self._get("epochs"), 0):
            done = f"{at.epoch} epochs and {at.batch} steps"
            raise UsageError(f"--epochs {self._get('epochs')}, but {done} are done already; give more epochs or none")
        if self.comm.rank == 0:
            self.folder.forget_after(step)
        if state is None:
            self.meters.load_state_dict(before)
            self._say(f"{self.folder.path} has no checkpoint that can be used; starting from the beginning")
            return
        self.strategy.load_state_dict(state["strategy"])
        checkpoint.set_random_state(state["random"])
        self.meters.load_state_dict(state["meters"])  # as if never stopped
        self.at = at
        self._say(f"resuming at step {step} of {self.num_steps}")

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
