"""powersgd against torch's PowerSGD hook: milliseconds a step, and the loss after so many steps of the same training.

    python benchmarks/powersgd.py [--links none 100mbit 1gbit] [--ranks 4] [--model resnet18] [--batch-size 128]
                                  [--rank 4] [--bucket-mb 25 1000] [--steps 10] [--rounds 5] [--train-steps 200]
                                  [--task digits] [--data DIR] [--seeds 3] [--lr 0.05] [--device cuda] [--threads 1]
                                  [--json FILE]

Each rank is on a host of its own; the link "none" is loopback, without hosts. Rounds alternate between no exchange,
plain DDP, torch's hook (one bucket: with two it waits for ever) and powersgd with each size of buckets, so that a
machine that slows down slows down each of them. All take the same update, SGD with momentum 0.9, on a copy of the same
model. On a GPU all compute in channels_last order. DDP has gradient_as_bucket_view and no broadcast of buffers.

Then each kind except the first trains on the data of a task, on the first link alone: losses do not depend on the link.
The loss at the end is the mean over the last tenth of the steps and over ranks. The loss of all steps says how fast it
fell. Both are given as mean ± standard deviation over seeds, of weights and of the order of samples. What counts is
powersgd's loss beside those of the hook and of DDP. All is sent in float32. The hook compresses from the third step on,
which is the earliest, powersgd from the first.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from conditions import conditions, where, write_json
from ddp import ddp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import thinwire as tw
from thinwire import netlab, registry
from thinwire.data import Loader, Shard
from thinwire.tasks.base import Task
from thinwire.tasks.loading import load_task

HOOK = "DDP, powerSGD_hook"
FIRST_COMPRESSED = 2  # torch's hook refuses to begin earlier, because DDP groups its buckets anew after the first step
LIMIT_SECONDS = 1800  # for one link
PORT = "29533"
SHAPE, CLASSES = (3, 32, 32), 10

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--links", nargs="+", default=["none", "100mbit", "1gbit"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=128, help="of each rank")
    parser.add_argument("--rank", type=int, default=4, help="of the approximation")
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[25.0, 1000.0], help="of powersgd")
    parser.add_argument("--steps", type=int, default=10, help="in each round")
    parser.add_argument("--rounds", type=int, default=5, help="0: train alone")
    parser.add_argument("--train-steps", type=int, default=200, help="0: time steps alone")
    parser.add_argument("--task", default="digits", help="to train on; 'thinwire list tasks' has their names")
    parser.add_argument("--data", type=Path, help="folder with the data of the task")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--role", choices=["rank"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "rank":
        measure(options)
        return
    found = {**conditions(options.device), "links": {}}
    for link in options.links:
        own = on_hosts(options, link, [] if link == options.links[0] else ["--train-steps", "0"])
        found["links"][link] = own
        if options.json:
            write_json(options.json, found)
        report(link, own, options, found)


# ---- on the hosts


def measure(options: argparse.Namespace) -> None:
    """On one rank: print the seconds of each kind of step, and its losses for each seed."""
    torch.set_num_threads(options.threads)
    with tw.join("gloo", device=options.device) as comm:
        times = time_kinds(options, comm) if options.rounds else {}
        losses: dict[str, list[list[float]]] = {}
        task = load_task(options.task, options.data, seed=0)
        for seed in range(options.seeds if options.train_steps else 0):
            model = make_model(options, seed, task.shape, task.classes)
            for kind, make in list(kinds(model, options, comm).items())[1:]:
                losses.setdefault(kind, []).append(train(make, task, options, comm, seed))
        if comm.rank == 0:
            print(json.dumps({"times": times, "losses": losses}))


def time_kinds(options: argparse.Namespace, comm: tw.Comm) -> dict[str, list[float]]:
    """Seconds of a step of each kind, by round."""
    batch = make_batch(options, comm.rank)
    model = make_model(options, 0, SHAPE, CLASSES)
    steps = {kind: make() for kind, make in kinds(model, options, comm).items()}
    for step in steps.values():
        timed(step, [batch] * (2 + FIRST_COMPRESSED), comm, options)
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(options.rounds):
        for kind, step in steps.items():
            times[kind].append(timed(step, [batch] * options.steps, comm, options) / options.steps)
    return times


def make_model(options: argparse.Namespace, seed: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = registry.build("models", options.model, shape, classes)
    return model.to(options.device, memory_format=layout(options))  # type: ignore[call-overload, no-any-return]


def layout(options: argparse.Namespace) -> torch.memory_format:
    """The order in memory of images and of the weights of convolutions: on a GPU as thinwire has it."""
    return torch.channels_last if options.device == "cuda" else torch.contiguous_format


def kinds(model: nn.Module, options: argparse.Namespace, comm: tw.Comm) -> dict[str, Callable[[], Step]]:
    """How to make each kind of step, from a copy of the model."""

    def hooked() -> nn.Module:
        wrapped = ddp(copy.deepcopy(model), bucket_cap_mb=1000)
        state = PowerSGDState(None, options.rank, start_powerSGD_iter=FIRST_COMPRESSED)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped

    def ours(bucket_mb: float) -> Step:
        spec = f"data_parallel(reducer=powersgd(rank={options.rank}), bucket_mb={bucket_mb})"
        made = functools.partial(sgd, lr=options.lr)
        strategy = tw.prepare(spec, model=copy.deepcopy(model), optimizer=made, loss=loss, comm=comm)
        return strategy.step

    makers: dict[str, Callable[[], Step]] = {
        "no exchange": lambda: plain_step(copy.deepcopy(model), options),
        "DDP": lambda: plain_step(ddp(copy.deepcopy(model)), options),
        HOOK: lambda: plain_step(hooked(), options),
    }
    return makers | {f"powersgd, buckets of {mb:g} MB": functools.partial(ours, mb) for mb in options.bucket_mb}


def plain_step(model: nn.Module, options: argparse.Namespace) -> Step:
    optimizer = sgd(model.parameters(), options.lr)

    def step(batch: Batch) -> Tensor:
        value: Tensor = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


loss = nn.functional.cross_entropy


def make_batch(options: argparse.Namespace, rank: int) -> Batch:
    """Images of noise with random labels, others on each rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    images = torch.randn(options.batch_size, *SHAPE, generator=generator)
    labels = torch.randint(0, CLASSES, (len(images),), generator=generator).to(options.device)
    return images.to(options.device, memory_format=layout(options)), labels


def task_batches(task: Task, options: argparse.Namespace, comm: tw.Comm, seed: int) -> Iterator[Batch]:
    """This rank's batches of one epoch after the other."""
    loader = Loader(task.train, Shard(comm.rank, comm.size), options.batch_size, seed=seed)
    while True:
        for inputs, targets in loader:
            images = task.transform(inputs.to(options.device), None)
            order = layout(options) if images.dim() == 4 else torch.contiguous_format
            yield images.contiguous(memory_format=order), targets.to(options.device)


def train(make: Callable[[], Step], task: Task, options: argparse.Namespace, comm: tw.Comm, seed: int) -> list[float]:
    """The loss of each step, as a mean over ranks."""
    torch.manual_seed(seed)  # for dropout
    step = make()
    batches = itertools.islice(task_batches(task, options, comm, seed), options.train_steps)
    found = [torch.as_tensor(step(batch)).reshape(()) for batch in batches]
    mean: list[float] = comm.mean(torch.stack(found).float().cpu()).tolist()
    return mean


def timed(step: Step, batches: list[Batch], comm: tw.Comm, options: argparse.Namespace) -> float:
    """Seconds until all ranks have taken these steps."""
    comm.barrier()
    begin = time.perf_counter()
    for batch in batches:
        step(batch)
    if options.device == "cuda":
        torch.cuda.synchronize()
    comm.barrier()
    return time.perf_counter() - begin


# ---- on the machine


def on_hosts(options: argparse.Namespace, link: str, more: list[str]) -> dict[str, Any]:
    """The measurements of rank 0, with one rank on each host; or with all ranks here, for the link "none"."""
    command = [sys.executable, __file__, *sys.argv[1:], *more, "--role", "rank"]
    with netlab.hosts(options.ranks, link) if link != "none" else nullcontext() as hosts, ExitStack() as started:
        address = hosts[0].address if hosts else "127.0.0.1"
        world = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": address, "MASTER_PORT": PORT}
        ranks = []
        for number in range(options.ranks):
            env = {**os.environ, **world, "TORCH_CPP_LOG_LEVEL": "ERROR", "RANK": str(number)}
            start = hosts[number].start if hosts else subprocess.Popen
            rank = started.enter_context(start(command, env=env, stdout=subprocess.PIPE, text=True))
            started.callback(rank.kill)
            ranks.append(rank)
        outputs = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), [rank.returncode for rank in ranks]
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def report(link: str, own: dict[str, Any], options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print the tables of one link: times of a step, then losses."""
    print(f"\nlink {link}, {options.ranks} ranks on {where(found['hardware'])}, torch {found['versions']['torch']}")
    print(f"{options.model}, batch {options.batch_size} a rank, rank {options.rank}; at {found['revision']}")
    if own["times"]:
        print(f"{'':>32}{'ms a step':>12}{'fastest – slowest':>20}{'× hook':>9}{'fastest × hook':>16}")
    for kind, times in own["times"].items():
        took, hook = [1e3 * t for t in times], own["times"][HOOK]
        line = f"{kind:>32}{statistics.median(took):12.1f}{f'{min(took):.1f} – {max(took):.1f}':>20}"
        print(f"{line}{statistics.median(times) / statistics.median(hook):9.3f}{min(times) / min(hook):16.3f}")
    if own["losses"]:
        about = f"({options.task}, {options.seeds} seeds)"
        print(f"{'':>32}{f'loss after {options.train_steps} steps':>22}{'of all steps':>20}   {about}")
    for kind, by_seed in own["losses"].items():
        ends = [losses[-max(1, len(losses) // 10) :] for losses in by_seed]
        print(f"{kind:>32}{mean_and_spread(ends):>22}{mean_and_spread(by_seed):>20}")
    sys.stdout.flush()


def mean_and_spread(by_seed: list[list[float]]) -> str:
    means = [statistics.mean(losses) for losses in by_seed]
    return f"{statistics.mean(means):.4f} ± {statistics.stdev(means) if len(means) > 1 else 0.0:.4f}"


if __name__ == "__main__":
    main()
