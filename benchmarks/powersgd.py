"""powersgd against torch's PowerSGD hook: milliseconds a step, and the loss after so many steps of the same training.

    python benchmarks/powersgd.py [--links none 100mbit 1gbit] [--ranks 4] [--model resnet18] [--batch-size 128]
                                  [--rank 4] [--bucket-mb 25 1000] [--steps 10] [--rounds 5] [--train-steps 200]
                                  [--lr 0.05] [--device cuda] [--threads 1] [--json FILE]

Each rank is on a host of its own; the link "none" is loopback, without hosts. Rounds alternate between no exchange,
plain DDP, torch's hook (one bucket: with two it waits for ever) and powersgd with each size of buckets, so that a
machine that slows down slows down each of them. All take the same update: SGD with momentum 0.9, on a model that was
copied. Then each kind except the first trains from the same weights on the same batches: pictures that a random
network has labelled, so that there is something to learn. The loss is the mean over the last tenth of the steps and
over ranks. Both hooks send everything in float32 and compress from the first step they may: torch's from the third.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import netlab, registry

FIRST_COMPRESSED = 2  # torch's hook refuses to begin earlier, because DDP groups its buckets anew after the first step
LIMIT_SECONDS = 1800  # for one link
PORT = "29533"

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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-steps", type=int, default=200, help="0: time steps alone")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write all measurements to this file")
    parser.add_argument("--role", choices=["rank"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "rank":
        measure(options)
        return
    found = {}
    for link in options.links:
        found[link] = on_hosts(options, link)
        report(link, found[link], options)
    if options.json:
        about = {"date": time.strftime("%F"), "torch": torch.__version__, "python": platform.python_version()}
        about |= {"device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()}
        with open(options.json, "w") as file:
            json.dump({**about, "command": " ".join(sys.argv), "links": found}, file, indent=1)


# ---- on the hosts


def measure(options: argparse.Namespace) -> None:
    """On one rank: print the seconds of each kind of step, and its losses."""
    torch.set_num_threads(options.threads)
    with tw.join("gloo", device=options.device) as comm:
        torch.manual_seed(0)
        model = registry.build("models", options.model, (3, 32, 32), 10).to(options.device)
        makers = kinds(model, options, comm)
        batches = list(make_batches(8, options, comm.rank))
        steps = {kind: make() for kind, make in makers.items()}
        for step in steps.values():
            timed(step, batches[: 2 + FIRST_COMPRESSED], comm, options)
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for _ in range(options.rounds):
            for kind, step in steps.items():
                run = [batches[i % len(batches)] for i in range(options.steps)]
                times[kind].append(timed(step, run, comm, options) / options.steps)
        del steps
        losses = {kind: train(make, options, comm) for kind, make in list(makers.items())[1:]}
        if comm.rank == 0:
            print(json.dumps({"times": times, "losses": losses}))


def kinds(model: nn.Module, options: argparse.Namespace, comm: tw.Comm) -> dict[str, Callable[[], Step]]:
    """How to make each kind of step, from a copy of the model."""

    def hooked() -> DistributedDataParallel:
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1000)
        state = PowerSGDState(None, options.rank, start_powerSGD_iter=FIRST_COMPRESSED)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp

    def ours(bucket_mb: float) -> Step:
        spec = f"data_parallel(reducer=powersgd(rank={options.rank}), bucket_mb={bucket_mb})"
        made = functools.partial(sgd, lr=options.lr)
        strategy = tw.prepare(spec, model=copy.deepcopy(model), optimizer=made, loss=loss, comm=comm)
        return strategy.step

    makers: dict[str, Callable[[], Step]] = {
        "no exchange": lambda: plain_step(copy.deepcopy(model), options),
        "DDP": lambda: plain_step(DistributedDataParallel(copy.deepcopy(model)), options),
        "DDP, powerSGD_hook": lambda: plain_step(hooked(), options),
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


def make_batches(count: int, options: argparse.Namespace, rank: int) -> Iterator[Batch]:
    """Pictures of noise, another for each rank, and the labels that a random network gives them."""
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 32), nn.Tanh(), nn.Linear(32, 10))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) / 8)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        x = torch.randn(options.batch_size, 3, 32, 32, generator=generator)
        yield x.to(options.device), teacher(x).argmax(1).to(options.device)


def train(make: Callable[[], Step], options: argparse.Namespace, comm: tw.Comm) -> list[float]:
    """The loss of each step, as a mean over ranks."""
    if not options.train_steps:
        return []
    torch.manual_seed(1)  # for dropout
    step = make()
    found = [
        torch.as_tensor(step(batch)).reshape(()) for batch in make_batches(options.train_steps, options, comm.rank)
    ]
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


def on_hosts(options: argparse.Namespace, link: str) -> dict[str, Any]:
    """The measurements of rank 0, with one rank on each host; or with all ranks here, for the link "none"."""
    command = [sys.executable, __file__, *sys.argv[1:], "--role", "rank"]
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


def report(link: str, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print one table."""
    print(
        f"\nlink {link}, {options.ranks} ranks, {options.model}, batch {options.batch_size} a rank, "
        f"rank {options.rank}, {options.device}, torch {torch.__version__}"
    )
    hook = found["times"]["DDP, powerSGD_hook"]
    print(
        f"{'':>32}{'ms a step':>12}{'fastest – slowest':>20}{'× hook':>9}{'fastest × hook':>16}{'loss at the end':>18}",
        flush=True,
    )
    for kind, times in found["times"].items():
        took = [1e3 * t for t in times]
        line = f"{kind:>32}{statistics.median(took):12.1f}{f'{min(took):.1f} – {max(took):.1f}':>20}"
        line += f"{statistics.median(times) / statistics.median(hook):9.3f}{min(times) / min(hook):16.3f}"
        if losses := found["losses"].get(kind):
            line += f"{statistics.mean(losses[-max(1, len(losses) // 10) :]):18.4f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
