"""The training loop against a hand-written one: same model, data, order in memory and precision, in one run.

    python benchmarks/loop.py [--kinds resnet18 gpt] [--device cuda] [--spec data_parallel] [--compile]

Rounds alternate between a hand-written loop, a loop of one's own with tw.prepare and tw.loader, and the loop of
`thinwire train`. The hand-written one has its data on the device, channels_last images on a GPU, autocast on a GPU and
fused optimizers; it checks nothing. `tiny` computes next to nothing: its difference is what the loop itself costs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset

import thinwire as tw
from thinwire import registry
from thinwire.config import RunConfig
from thinwire.data import derive_seed
from thinwire.run.worker import Run
from thinwire.tasks.base import Task
from thinwire.tasks.cifar10 import MEAN, STD, crop_and_flip

MODELS = {"resnet18": "resnet18", "gpt": "gpt", "tiny": "gpt(width=16, depth=4, heads=2)"}
BATCH_SIZES = {"resnet18": 512, "gpt": 32, "tiny": 2}
CONTEXTS = {"gpt": 128, "tiny": 8}
OPTIMIZERS = {"resnet18": "sgd(nesterov=True, weight_decay=0.0005)", "gpt": "adamw", "tiny": "adamw"}
CLIP_NORM = {"resnet18": None, "gpt": 1.0, "tiny": None}
CONSTANTS: dict[torch.device, tuple[Tensor, Tensor]] = {}


def normalise(images: Tensor, generator: Generator | None) -> Tensor:
    """The transform of the task cifar10."""
    if images.device not in CONSTANTS:
        mean, std = (torch.tensor(x, device=images.device)[:, None, None] for x in (MEAN, STD))
        CONSTANTS[images.device] = mean, std
    mean, std = CONSTANTS[images.device]
    normalised = (images.float() / 255 - mean) / std
    return crop_and_flip(normalised, generator) if generator else normalised


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def task(data: Path | None, seed: int, /, *, kind: str = "resnet18", steps: int = 30) -> Task:
    """Random data of CIFAR-10's or Shakespeare's shape, so many steps of it."""
    batch_size = BATCH_SIZES[kind]
    count = batch_size * steps
    defaults = {
        "batch_size": batch_size, "lr": 1e-3, "optimizer": OPTIMIZERS[kind], "schedule": "constant", "epochs": 10**6,
        "clip_norm": CLIP_NORM[kind],
    }  # fmt: skip
    defaults = {name: value for name, value in defaults.items() if value is not None}
    if kind == "resnet18":
        images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
        labels = torch.randint(0, 10, (count,))
        test = TensorDataset(images[:8], labels[:8])
        return Task(TensorDataset(images, labels), test, (3, 32, 32), 10, MODELS[kind], transform=normalise,
                    defaults=defaults)  # fmt: skip
    tokens = torch.randint(0, 65, (count, CONTEXTS[kind] + 1))
    train = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    test = TensorDataset(*(t[:8] for t in train.tensors))
    return Task(train, test, (CONTEXTS[kind],), 65, MODELS[kind], token_loss, "loss", defaults=defaults)


def hand_written(given: Task, kind: str, device: torch.device, compile: bool) -> Callable[[], None]:
    """An epoch of an ordinary loop."""
    images = device.type == "cuda" and kind == "resnet18"
    model = given.build_model().to(device)
    if images:
        model = model.to(memory_format=torch.channels_last)
    forward = torch.compile(model) if compile else model
    optimizer = registry.build("optimizers", OPTIMIZERS[kind], 1e-3)(list(model.parameters()))
    inputs, targets = (t.to(device) for t in given.train.tensors)  # type: ignore[attr-defined]
    generator = torch.Generator(device)

    def epoch() -> None:
        order = torch.randperm(len(inputs)).to(device)
        for i, indices in enumerate(order.split(BATCH_SIZES[kind])):
            x = given.transform(inputs[indices], generator.manual_seed(derive_seed(0, i)))
            x = x.contiguous(memory_format=torch.channels_last) if images else x
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = given.loss(forward(x), targets[indices])
            loss.backward()
            if CLIP_NORM[kind] is not None:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM[kind])
            optimizer.step()

    return epoch


def own_loop(
    given: Task, kind: str, comm: tw.Comm, device: torch.device, options: argparse.Namespace
) -> Callable[[], None]:
    """An epoch of a loop of one's own with a trainer."""
    trainer = tw.prepare(
        options.spec, model=given.build_model().to(device), loss=given.loss, comm=comm, clip_norm=CLIP_NORM[kind],
        optimizer=registry.build("optimizers", OPTIMIZERS[kind], 1e-3), autocast=device.type == "cuda",
        compile=options.compile,
    )  # fmt: skip
    batches = tw.loader(given.train, trainer.shard, BATCH_SIZES[kind], device=device)
    generator = torch.Generator(device)

    def epoch() -> None:
        for i, (x, y) in enumerate(tw.epoch(trainer, batches, comm)):
            trainer.step((given.transform(x, generator.manual_seed(derive_seed(0, i))), y))

    return epoch


def measure(kind: str, comm: tw.Comm, device: torch.device, options: argparse.Namespace, folder: str) -> None:
    given = task(None, 0, kind=kind, steps=options.steps)
    spec = f"benchmarks.loop:task(kind={kind}, steps={options.steps})"
    config: dict[str, Any] = {"autocast": device.type == "cuda", "compile": options.compile, "out": f"{folder}/{kind}"}
    run = Run(RunConfig(task=spec, strategy=options.spec, **config), comm, device)
    run.folder.save_config(run.config)
    loops = {
        "hand-written": hand_written(given, kind, device, options.compile),
        "tw.prepare": own_loop(given, kind, comm, device, options),
        "thinwire train": run._train_epoch,
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(options.rounds + 2):  # the first two are not counted
        for name, epoch in loops.items() if turn % 2 else reversed(loops.items()):
            before, begin = run.at.train_seconds, time.perf_counter()
            epoch()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin if name != "thinwire train" else run.at.train_seconds - before
            if turn > 1:
                times[name].append(seconds / options.steps)
    base = statistics.median(times["hand-written"])
    for name, found in times.items():
        middle = statistics.median(found)
        each = "  ".join(f"{1e3 * seconds:.3f}" for seconds in sorted(found))
        print(f"{kind:9} {name:15} {1e3 * middle:8.3f} ms a step  × {middle / base:.3f}  "
              f"{1e6 * (middle - base):+7.0f} µs   rounds: {each}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", choices=list(MODELS), default=["resnet18", "gpt", "tiny"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--spec", default="data_parallel")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        print(torch.cuda.get_device_name(device), end=", ")
    print(f"torch {torch.__version__}, {options.spec}, {options.steps} steps a round")
    with tw.join(device=device) as comm, tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            measure(kind, comm, device, options, folder)


if __name__ == "__main__":
    main()
