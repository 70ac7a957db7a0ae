"""The trainer alone, on one rank: `thinwire train` and `tw.prepare` against a loop written by hand, on the same data.

The data are random: files as CIFAR-10 has them, and a text for the task shakespeare. Rounds alternate between the three
loops; a round is an epoch. Of each `thinwire train` the last of two epochs counts, without evaluation and checkpoints.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conditions import Found
from floor_results import BY_HAND
from torch import Tensor, nn

import thinwire as tw
from thinwire import registry
from thinwire.config import make_config
from thinwire.run.worker import run_rank
from thinwire.tasks.base import Task
from thinwire.tasks.loading import load_task

ROUNDS = 3
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;:!?'-&3\n"
Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Case:
    """A task and a model to train."""

    name: str
    task: str
    model: str
    batch_size: int
    characters: int = 0  # of the text, for shakespeare


CASES = {
    "cuda": [
        Case("ResNet-18, batch 512", "cifar10", "resnet18", 512),
        Case(
            "GPT, 6 blocks of 384, batch 64", "shakespeare(context=256)", "gpt(width=384, depth=6, heads=6)", 64,
            characters=2_000_000,
        ),
    ],
    "cpu": [
        Case(
            "MLP, 3 layers of 512, batch 32", "synthetic(features=1024, width=512, depth=3)",
            "mlp(width=512, depth=3)", 32,
        ),
        Case("GPT, 2 blocks of 64, batch 16", "shakespeare(context=32)", "gpt(width=64, depth=2)", 16, 60_000),
    ],
}  # fmt: skip


def measure_case(case: Case, device: torch.device, within: Path) -> Found:
    """Milliseconds of a step of each loop, by round. Files are made in a folder that the caller removes."""
    with tempfile.TemporaryDirectory(dir=within) as parent:
        folder = Path(parent)
        write_data(case, folder)
        task = load_task(case.task, folder, 0)
        loops = hand_written(case, task, device), prepared(case, task, device)
        with tw.join(device=device) as comm:
            data = [t.to(device) for t in tensors(task)]
            steps = [make(comm) for make in loops]
            names = [BY_HAND, "trainer.step of tw.prepare", "thinwire train"]
            times: dict[str, list[float]] = {name: [] for name in names}
            for number in range(-1, ROUNDS):  # the first one warms up
                for name, step in zip(names, steps, strict=False):
                    times[name].append(epoch_ms(case, task, data, step, device))
                times[names[2]].append(train_ms(case, lr_of(task), folder / f"run-{number}", folder, device))
    kept = {name: [round(ms, 3) for ms in own[1:]] for name, own in times.items()}
    return {"name": case.name, "task": case.task, "model": case.model, "batch_size": case.batch_size, "ms": kept}


def tensors(task: Task) -> tuple[Tensor, ...]:
    """The training set as tensors: inputs and targets."""
    found: tuple[Tensor, ...] = task.train.tensors  # type: ignore[attr-defined]
    return found


def write_data(case: Case, folder: Path) -> None:
    """Random files in the format that the task reads."""
    generator = torch.Generator().manual_seed(0)
    if case.task == "cifar10":
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            records = torch.randint(0, 256, (10000, 3073), dtype=torch.uint8, generator=generator)
            records[:, 0] %= 10
            records.numpy().tofile(folder / f"{name}.bin")
    elif case.characters:
        letters = torch.randint(0, len(LETTERS), (case.characters,), generator=generator).tolist()
        (folder / "shakespeare.txt").write_text("".join(LETTERS[i] for i in letters))


def train_ms(case: Case, lr: float, out: Path, data: Path, device: torch.device) -> float:
    """A step of `thinwire train` in its second epoch."""
    settings = {
        "task": case.task, "model": case.model, "batch_size": case.batch_size, "epochs": 2, "data": data, "out": out,
        "device": device.type, "autocast": device.type == "cuda", "strategy": "data_parallel", "schedule": "constant",
        "lr": lr,
    }  # fmt: skip
    run_rank(make_config(settings), progress_file=out.with_suffix(".progress"))
    first, second = (json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines())
    seconds: float = second["train_seconds"] - first["train_seconds"]
    steps: int = second["step"] - first["step"]
    return 1e3 * seconds / steps


def epoch_ms(case: Case, task: Task, data: list[Tensor], step: Step, device: torch.device) -> float:
    """A step of a loop of one's own over the whole set, which is on the device; the last, smaller batch too."""
    generator = torch.Generator(device).manual_seed(0)
    begin = time.perf_counter()
    batches = torch.randperm(len(data[0]), generator=generator, device=device).split(case.batch_size)
    for indices in batches:
        step(task.transform(data[0][indices], generator), data[1][indices])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / len(batches)


def lr_of(task: Task) -> float:
    """A learning rate that random data do not make diverge."""
    lr: float = task.defaults["lr"]
    return lr / 10


def optimizer_of(task: Task, fused: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """The task's optimizer and learning rate, fused on a GPU."""
    make = registry.build("optimizers", task.defaults["optimizer"], lr_of(task))

    def made(parameters: Any) -> torch.optim.Optimizer:
        plain = make(list(parameters))
        options = {k: v for k, v in plain.defaults.items() if k not in ("foreach", "fused", "decoupled_weight_decay")}
        groups = [group["params"] for group in plain.param_groups]
        same: torch.optim.Optimizer = type(plain)([p for group in groups for p in group], **options, fused=fused)
        return same

    return made


def build(case: Case, task: Task) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    return task.build_model(case.model)


def hand_written(case: Case, task: Task, device: torch.device) -> Callable[[tw.Comm], Step]:
    """A loop with channels_last for images, bfloat16 and a fused optimizer on a GPU, and the task's clipping."""
    on_gpu, clip_norm = device.type == "cuda", task.defaults.get("clip_norm")
    layout = torch.channels_last if on_gpu and len(task.shape) == 3 else torch.contiguous_format

    def make(comm: tw.Comm) -> Step:
        model = build(case, task).to(device, memory_format=layout)  # type: ignore[call-overload]
        optimizer = optimizer_of(task, on_gpu)(model.parameters())

        def step(inputs: Tensor, targets: Tensor) -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = task.loss(model(inputs.contiguous(memory_format=layout)), targets)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def prepared(case: Case, task: Task, device: torch.device) -> Callable[[tw.Comm], Step]:
    """The same loop with the trainer of `tw.prepare`."""

    def make(comm: tw.Comm) -> Step:
        trainer = tw.prepare(
            "data_parallel", model=build(case, task).to(device), optimizer=optimizer_of(task, device.type == "cuda"),
            loss=task.loss, comm=comm, clip_norm=task.defaults.get("clip_norm"), autocast=device.type == "cuda",
        )  # fmt: skip
        return lambda inputs, targets: trainer.step((inputs, targets))

    return make
