"""One rank: connect, build, train, evaluate, keep records."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn

import thinwire
from thinwire import checkpoint, registry
from thinwire.checkpoint import Checkpoints
from thinwire.comm.base import Comm, gather_json
from thinwire.comm.process import join, pick_device
from thinwire.comm.world import World, find_world
from thinwire.config import MAY_CHANGE, RunConfig
from thinwire.data import Loader, mix
from thinwire.errors import RunError, ThinwireError, UsageError
from thinwire.progress import Progress, Shown, Silent, result_table
from thinwire.records import RunFolder
from thinwire.strategies.base import Recipe, Strategy
from thinwire.tasks.base import Task, load_task

T = TypeVar("T")
CHECK_EVERY_STEPS = 20  # how often losses are looked at; on a GPU each look waits for it
FALLBACK = {"epochs": 10, "batch_size": 32, "lr": 0.1, "optimizer": "sgd", "schedule": "cosine"}


def run_rank(config: RunConfig) -> dict[str, Any]:
    """Train as one rank of the world that this process is in; returns the summary."""
    world = find_world()
    device = _device(config, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with join(device=device) as comm:
        return Run(config, comm, device).run()


@dataclass
class Position:
    """Where a run is: enough, with the states of strategy and random generators, to go on exactly."""

    epoch: int = 0
    batch: int = 0  # the next one of this epoch
    step: int = 0
    loss_sum: float = 0.0  # over this epoch's batches, on this rank
    best: float | None = None
    seconds: float = 0.0  # spent before this process began
    train_seconds: float = 0.0


class Run:
    """A run as one rank sees it."""

    def __init__(self, config: RunConfig, comm: Comm, device: torch.device) -> None:
        self.begin = time.monotonic()
        self.comm = comm
        self.device = device
        self.task = load_task(config.task, config.data, config.seed)
        self.config = with_defaults(config, self.task, comm)
        self.folder = _agree(comm, lambda: str(open_folder(config, self.config).path))
        torch.manual_seed(config.seed)
        model = self.task.build_model(config.model).to(device)
        self.num_parameters = count(model)
        self.strategy = self._strategy(model)
        self.loader = Loader(self.task.train, self.strategy.shard, self._get("batch_size"), seed=config.seed)
        self.num_steps = self._get("epochs") * len(self.loader)
        torch.manual_seed(mix(config.seed, comm.rank))  # dropout differs between ranks
        self.at = Position()
        self.losses: list[Tensor] = []  # not yet looked at

    def run(self) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one to resume."""
        folder = RunFolder(Path(self.folder))
        self.progress: Progress = Silent()
        try:
            self.checkpoints = Checkpoints(
                folder.checkpoints, self.comm, self._identity(), self.config.keep, self._warn
            )
            if self.config.resume:
                self._resume(folder)
            if self.comm.rank == 0:
                self.progress = Shown(self.task.metric, self.num_steps, self.at.step, self._get("epochs"))
            while self.at.epoch < self._get("epochs"):
                self._epoch(folder)
        finally:
            self.progress.close()
        return self._finish(folder)

    # ---- training

    def _strategy(self, model: nn.Module) -> Strategy:
        optimizer = registry.build("optimizers", self._get("optimizer"), self._get("lr"))
        factor = registry.build("schedules", self._get("schedule"))
        recipe = Recipe(
            loss=self.task.loss,
            optimizer=optimizer,
            schedule=lambda step: factor((step + 0.5) / len(self.loader), self._get("epochs")),
            clip_norm=self.config.clip_norm,
            accumulate=self.config.accumulate,
            autocast=self.config.autocast,
        )
        strategy: Strategy = registry.build("strategies", self.config.strategy, model, recipe, self.comm)
        return strategy

    def _epoch(self, folder: RunFolder) -> None:
        begin = time.monotonic()
        first = self.at.batch
        for inputs, targets in self.loader.batches(self.at.epoch, start=first):
            self.losses.append(self.strategy.step((self._transformed(inputs), targets)))
            self.at.batch += 1
            self.at.step += 1
            if len(self.losses) >= CHECK_EVERY_STEPS or self.progress.due():
                self._look(begin, first)
            every = self.config.checkpoint_every
            if every and self.at.step % every == 0:
                self._look(begin, first)
                self.checkpoints.save(self.at.step, lambda: self._state(begin))
        self._look(begin, first)
        self.at.train_seconds += time.monotonic() - begin
        row = self._record(folder, time.monotonic() - begin, self.at.batch - first)
        self.at = Position(
            self.at.epoch + 1,
            0,
            self.at.step,
            0.0,
            self._better(row[self.task.metric]),
            self.at.seconds,
            self.at.train_seconds,
        )
        self.checkpoints.save(self.at.step, lambda: self._state(time.monotonic()))
        self.progress.epoch(row)

    def _look(self, begin: float, first: int) -> None:
        """Add up the losses since the last look, stop on one that is not finite, show progress."""
        if not self.losses:
            return
        losses = torch.stack(self.losses).double().cpu()
        self.losses.clear()
        if not losses.isfinite().all():
            step = self.at.step - len(losses) + int((~losses.isfinite()).nonzero()[0]) + 1
            raise RunError(
                f"the loss is {losses[step - self.at.step - 1].item()} at step {step}; "
                "try a lower --lr, a warm-up (--schedule 'cosine(warmup_epochs=1)') or --clip-norm 1"
            )
        self.at.loss_sum += losses.sum().item()
        if self.progress.due():
            samples = (self.at.batch - first) * self._get("batch_size") * self.comm.size
            speed = samples / (time.monotonic() - begin)
            self.progress.step(self.at.step, losses[-1].item(), speed, self.comm.ledger.wire_bytes)

    def _transformed(self, inputs: Tensor) -> Tensor:
        """Inputs as the model sees them, with augmentation that depends on (seed, epoch, batch, shard) alone."""
        seed = mix(self.config.seed, self.at.epoch, self.at.batch, self.strategy.shard.index)
        generator = torch.Generator(self.device).manual_seed(seed)
        return self.task.transform(inputs.to(self.device, non_blocking=True), generator)

    # ---- evaluation and records

    def _record(self, folder: RunFolder, seconds: float, num_batches: int) -> dict[str, Any]:
        model = self.strategy.consolidate()
        with self.comm.ledger.purpose("eval"):
            train_loss = self.comm.mean(torch.tensor(self.at.loss_sum / max(self.at.batch, 1), dtype=torch.float64))
            tested = evaluate(model, self.task, self.comm, self.device, self.config.autocast, self._get("batch_size"))
        rows = self.comm.ledger.rows()
        with self.comm.ledger.purpose("eval"):
            ledgers = gather_json(self.comm, rows)
        where = {"step": self.at.step, "epoch": self.at.epoch + 1}
        row = {
            **where,
            "seconds": self._seconds(),
            "train_seconds": self.at.train_seconds,
            "train_loss": train_loss.item(),
            **tested,
            "samples_per_second": num_batches * self._get("batch_size") * self.comm.size / seconds,
            "wire_bytes": sum(r["wire_bytes"] for r in rows),
        }
        if self.comm.rank == 0:
            folder.append(folder.metrics, [row])
            lines = [{**where, "rank": rank, **line} for rank, ledger in enumerate(ledgers) for line in ledger]
            folder.append(folder.ledger, lines)
        return row

    def _finish(self, folder: RunFolder) -> dict[str, Any]:
        model = self.strategy.consolidate()
        with self.comm.ledger.purpose("eval"):
            tested = evaluate(model, self.task, self.comm, self.device, self.config.autocast, self._get("batch_size"))
            rows = self.comm.ledger.rows()
            everyones = gather_json(self.comm, {"rows": rows, "peak": _peak_memory(self.device)})
        by_link: dict[str, int] = {}
        for row in (row for rank in everyones for row in rank["rows"]):
            by_link[row["link"]] = by_link.get(row["link"], 0) + row["wire_bytes"]
        summary = {
            "task": self.config.task,
            "strategy": self.config.strategy,
            "model": self.config.model or (self.task.model if isinstance(self.task.model, str) else self.config.task),
            "ranks": self.comm.size,
            "nodes": 1,
            "link": None,
            "seed": self.config.seed,
            "epochs": self._get("epochs"),
            "steps": self.at.step,
            "seconds": self._seconds(),
            "train_seconds": self.at.train_seconds,
            "metric": self.task.metric,
            "value": tested[self.task.metric],
            "best": self._better(tested[self.task.metric]),
            "wire_bytes_per_rank": round(sum(by_link.values()) / self.comm.size),
            "wire_bytes_by_link": by_link,
            "kernel_bytes_per_rank": None,
            "parameters": self.num_parameters,
            "parameters_consolidated": count(model),
            "peak_memory_bytes": max(rank["peak"] for rank in everyones),
            "versions": versions(self.device),
        }
        if self.comm.rank == 0:
            checkpoint.save_model(model, folder.model)
            folder.save_summary(summary)
            console = Console()
            console.print(result_table(summary, rows))
            console.print(f"results in {folder.path}", highlight=False, soft_wrap=True)
        with self.comm.ledger.purpose("checkpoint"):
            self.comm.barrier()  # nobody leaves before the results are written
        return summary

    # ---- checkpoints

    def _state(self, epoch_begin: float) -> dict[str, Any]:
        at = asdict(self.at)
        at["seconds"] = self._seconds()
        at["train_seconds"] += time.monotonic() - epoch_begin
        return {
            "strategy": self.strategy.state_dict(),
            "random": checkpoint.random_state(),
            "position": at,
            "ledger": self.comm.ledger.rows(),
        }

    def _resume(self, folder: RunFolder) -> None:
        booked = self.comm.ledger.rows()
        found = self.checkpoints.load_latest()
        self.comm.ledger.load_rows(found[1]["ledger"] if found else booked)  # as if never stopped
        if found is None:
            self._warn(f"{folder.path} has no checkpoint that can be used; starting from the beginning")
        step, state = found or (0, None)
        if self.comm.rank == 0:
            folder.forget_after(step)
        if state is None:
            return
        self.strategy.load_state_dict(state["strategy"])
        checkpoint.set_random_state(state["random"])
        self.at = Position(**state["position"])
        self._warn(f"resuming at step {step} of {self.num_steps}")

    def _identity(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json", exclude=MAY_CHANGE)

    # ---- small things

    def _get(self, name: str) -> Any:
        value = getattr(self.config, name)
        assert value is not None, name
        return value

    def _seconds(self) -> float:
        return self.at.seconds + time.monotonic() - self.begin

    def _better(self, value: float) -> float:
        pick = max if self.task.metric == "accuracy" else min
        return value if self.at.best is None else pick(self.at.best, value)

    def _warn(self, text: str) -> None:
        if self.comm.rank == 0 or "damaged" in text:
            print(f"rank {self.comm.rank}: {text}", file=sys.stderr, flush=True)


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, comm: Comm, device: torch.device, autocast: bool, batch_size: int
) -> dict[str, float]:
    """Loss and accuracy over the whole test set, each rank taking a part of it."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct answers, samples
    for indices in torch.arange(len(task.test))[comm.rank :: comm.size].split(4 * batch_size):
        inputs, targets = (t.to(device) for t in task.test[indices])
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            outputs = model(task.transform(inputs, None))
            loss = task.loss(outputs, targets)
        correct = (outputs.argmax(-1) == targets).double().mean() if task.metric == "accuracy" else torch.zeros(())
        totals += torch.stack([loss.double().cpu(), correct.double().cpu(), torch.ones(())]) * len(targets)
    loss_sum, num_correct, num_samples = comm.sum(totals).tolist()
    result = {"loss": loss_sum / num_samples}
    return result | ({"accuracy": 100 * num_correct / num_samples} if task.metric == "accuracy" else {})


def with_defaults(config: RunConfig, task: Task, comm: Comm) -> RunConfig:
    """The config with every open setting filled in from the task."""
    filled = {**FALLBACK, **task.defaults, "ranks": comm.size}
    open_settings = {name: value for name, value in filled.items() if getattr(config, name) is None}
    return RunConfig(**{**config.model_dump(), **open_settings})


def open_folder(asked: RunConfig, config: RunConfig) -> RunFolder:
    """The folder to write to. `config` is `asked` with every setting filled in."""
    folder = RunFolder.existing(asked.out) if asked.resume else RunFolder.new(asked)
    folder.save_config(config)
    return folder


def count(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def versions(device: torch.device) -> dict[str, str]:
    """What a reader needs to know to repeat a run."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"thinwire": thinwire.__version__, "torch": torch.__version__, "python": platform.python_version(), **gpu}


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device(config: RunConfig, world: World | None) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    device = pick_device(world)
    if config.device == "cuda" and device.type != "cuda":
        raise UsageError(
            "--device cuda, but torch finds no GPU here; use --device cpu or install a CUDA build of torch"
        )
    return device


def _agree(comm: Comm, run: Callable[[], T]) -> T:
    """Do something on rank 0 alone and give every rank its JSON result, or its error."""
    answer: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            answer = {"value": run()}
        except ThinwireError as error:
            answer = {"error": str(error), "usage": isinstance(error, UsageError)}
    with comm.ledger.purpose("start"):
        answer = gather_json(comm, answer)[0]
    if "error" in answer:
        raise (UsageError if answer["usage"] else RunError)(answer["error"])
    value: T = answer["value"]
    return value
