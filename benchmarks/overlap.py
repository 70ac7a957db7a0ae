"""Does communication hide behind the backward pass, and is the link always busy? Ratios, measured in one run.

    python benchmarks/overlap.py [SPEC …] [--model resnet18] [--batch-size 32] [--ranks 2]

First the backward pass is timed on hosts with an unlimited link. Then the link is made so slow that the exchange of
gradients takes as long, and then ten times slower, so that the exchange dominates. Each time the same processes
measure, in turn, a step without exchange, the exchange alone, and whole steps of each strategy.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import thinwire as tw
from thinwire import netlab, registry

ROUNDS, STEPS = 3, 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=["data_parallel"])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        measure(options)
    else:
        report(options)


# ---- on the hosts


def measure(options: argparse.Namespace) -> None:
    """On one rank: print the seconds of each kind of step."""
    torch.set_num_threads(1)
    with tw.join("gloo", device="cpu") as comm:
        torch.manual_seed(0)
        model = registry.build("models", options.model, (3, 32, 32), 10)
        batch = torch.randn(options.batch_size, 3, 32, 32), torch.randint(0, 10, (options.batch_size,))
        kinds: dict[str, Callable[[], object]] = {
            "forward": functools.partial(forward, copy.deepcopy(model), batch),
            "compute": functools.partial(compute_step, copy.deepcopy(model), batch),
            "exchange": functools.partial(comm.mean, torch.cat([p.detach().flatten() for p in model.parameters()])),
        }
        for spec in options.specs:
            trainer = tw.prepare(spec, model=copy.deepcopy(model), optimizer=sgd, loss=loss, comm=comm)
            kinds[spec] = functools.partial(trainer.step, batch)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for run in kinds.values():
            run()
        for _ in range(ROUNDS):
            for kind, run in kinds.items():
                times[kind].append(seconds(run, comm))
        if comm.rank == 0:
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            print(json.dumps({"bytes": size, **{kind: statistics.median(found) for kind, found in times.items()}}))


def forward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> object:
    return loss(model(batch[0]), batch[1])


def compute_step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> object:
    optimizer = sgd(model.parameters())
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return None


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)  # type: ignore[arg-type]


loss = torch.nn.functional.cross_entropy


def seconds(run: Callable[[], object], comm: tw.Comm) -> float:
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        run()
    comm.barrier()
    return (time.perf_counter() - begin) / STEPS


# ---- on the machine


def report(options: argparse.Namespace) -> None:
    """Time the backward pass, choose links by it, and print the time of steps on them."""
    free = on_hosts(options, None)
    backward = free["compute"] - free["forward"]
    wire_bytes = 2 * (options.ranks - 1) / options.ranks * free["bytes"]
    print(
        f"{options.model}, batch {options.batch_size}, {options.ranks} hosts, {free['bytes'] / 1e6:.1f} MB of gradients"
    )
    print(f"forward {1e3 * free['forward']:.0f} ms, backward and update {1e3 * backward:.0f} ms")
    for slower, what in ((1, "exchange ≈ backward"), (10, "the exchange dominates")):
        link = netlab.Link(rate_mbit=round(wire_bytes * 8e-6 / backward / slower, 1))
        found = on_hosts(options, link)
        floor = wire_bytes * 8e-6 / link.rate_mbit
        print(f"\n{what}: link {link}, compute {1e3 * found['compute']:.0f} ms, ", end="")
        print(f"exchange alone {1e3 * found['exchange']:.0f} ms, wire floor {1e3 * floor:.0f} ms")
        for spec in options.specs:
            step = found[spec]
            print(
                f"{spec:>32}: {1e3 * step:5.0f} ms a step = {step / (found['compute'] + found['exchange']):.3f} × "
                f"(compute + exchange) = {step / floor:.3f} × wire floor"
            )


def on_hosts(options: argparse.Namespace, link: netlab.Link | None) -> dict[str, float]:
    """The measurements of rank 0, with one rank on each host."""
    with netlab.hosts(options.ranks, link) as hosts:
        if link is not None:
            measured = hosts.measure()
            print(f"\nlink {link} measured {measured.rate_mbit:.1f} Mbit/s", end="")
        world = {"WORLD_SIZE": str(options.ranks), "MASTER_PORT": "29500"}
        env = {**os.environ, **world, "MASTER_ADDR": hosts[0].address, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, __file__, *sys.argv[1:], "--as-rank"]
        ranks = [
            host.start(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank, host in enumerate(hosts)
        ]
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks)
    found: dict[str, float] = json.loads(outputs[0])
    return found


if __name__ == "__main__":
    main()
