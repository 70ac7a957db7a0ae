"""The time of a step of data_parallel, as a ratio to plain DDP and to a step without exchange, in one run.

    torchrun --nproc-per-node 4 benchmarks/data_parallel.py [SPEC …] [--model resnet18] [--batch-size 64] [--steps 30]

Rounds alternate between all kinds of step, so that a machine that slows down slows down each of them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import registry
from thinwire.comm.join import pick_device
from thinwire.comm.world import find_world

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=["data_parallel"])
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    device = pick_device(find_world())
    with tw.join(device=device) as comm:
        torch.manual_seed(0)
        model = registry.build("models", options.model, (3, 32, 32), 10).to(device)
        batch = (
            torch.randn(options.batch_size, 3, 32, 32, device=device),
            torch.randint(0, 10, (options.batch_size,), device=device),
        )
        steps: dict[str, Callable[[], Tensor]] = {
            "no exchange": plain_step(copy.deepcopy(model), batch),
            "plain DDP": plain_step(DistributedDataParallel(copy.deepcopy(model)), batch),
        }
        for spec in options.specs:
            ours = tw.prepare(spec, model=copy.deepcopy(model), optimizer=sgd, loss=loss, comm=comm)
            steps[spec] = functools.partial(ours.step, batch)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            seconds(step, 3, comm)
        for _ in range(ROUNDS):
            for name, step in steps.items():
                times[name].append(seconds(step, options.steps, comm) / options.steps)
        if comm.rank == 0:
            report(options, comm.size, device, times)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, 0.9)  # type: ignore[arg-type]


loss = nn.functional.cross_entropy


def plain_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    optimizer = sgd(model.parameters())

    def step() -> Tensor:
        value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def seconds(step: Callable[[], Tensor], count: int, comm: tw.Comm) -> float:
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        value = step()
    value.item()  # waits for a GPU
    comm.barrier()
    return time.perf_counter() - begin


def report(options: argparse.Namespace, ranks: int, device: torch.device, times: dict[str, list[float]]) -> None:
    base = statistics.median(times["plain DDP"])
    print(
        f"{options.model}, batch {options.batch_size} a rank, {ranks} ranks on {device.type}, torch {torch.__version__}"
    )
    for name, values in times.items():
        middle, low, high = statistics.median(values), min(values), max(values)
        spread = f"{1e3 * low:.1f} – {1e3 * high:.1f}"
        print(f"{name:>30}  {1e3 * middle:8.1f} ms a step ({spread})  {middle / base:5.2f} × plain DDP")


if __name__ == "__main__":
    main()
