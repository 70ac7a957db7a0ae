"""The cost and the gain of reducers: kernels against a memory copy, then training steps on slow links against DDP.

    python benchmarks/reducers.py [REDUCER …] [--links 100mbit 1gbit] [--ranks 4] [--model "mlp(width=1024, depth=3)"]
                                  [--batch-size 8] [--steps 4] [--rounds 5] [--only kernels|steps]

Kernels are timed in one thread, in turn with a copy of the same tensor. Steps are timed with one rank on each host.
Rounds alternate between all kinds of step, so that a machine that slows down slows down each of them. The hosts share
the cores of this machine: on a fast link the cores limit the steps, not the link. With THINWIRE_KERNELS=compiled the
steps use the compiled kernels too.
"""

# More than 250 lines in one file, because the program starts itself again: as a timer of kernels, and as each rank.

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from ddp import ddp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import thinwire as tw
from thinwire import kernels, netlab, registry
from thinwire.comm.wire_bytes import all_reduce_bytes
from thinwire.reducers.maxnorm import sum_levels

REDUCERS = [
    "mean",
    "bf16",
    "maxnorm",
    "maxnorm(predicted=True)",
    "maxnorm(bits=4)",
    "error_feedback(maxnorm(bits=4))",
    "powersgd(rank=4)",
    "error_feedback(global_randk(ratio=0.01))",
]
VECTOR_MIB, BLOCK, KERNEL_ROUNDS = 25, 512, 15
LEVELS = sum_levels(4)
GOALS = {"quantise + dequantise": "goal: eager ≤ 15, compiled ≤ 3"}
WARMUP_STEPS = 3  # DDP groups its buckets anew after the first; torch's PowerSGD compresses from the third on
ROUND_SECONDS = 1.5  # of one kind of step: where one step is slow, a round has fewer
LIMIT_SECONDS = 900  # for all steps on one link

Step = Callable[[], object]
Batch = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("reducers", nargs="*", default=REDUCERS)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="mlp(width=1024, depth=3)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="in each round; fewer where they are slow")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["kernels", "steps"])
    parser.add_argument("--role", choices=["kernels", "rank"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "kernels":
        measure_kernels()
    elif options.role == "rank":
        measure_steps(options)
    else:
        report(options)


# ---- kernels


def measure_kernels() -> None:
    """Print the time of each path through the kernels as a multiple of a memory copy, and the seconds of the copy."""
    torch.set_num_threads(1)
    x = torch.randn(VECTOR_MIB * 2**18, generator=torch.Generator().manual_seed(0))
    copy_x: Step = functools.partial(torch.empty_like(x).copy_, x)
    paths: dict[str, Step] = {
        "quantise + dequantise": functools.partial(in_8_bits, x),
        "… and what was lost": functools.partial(in_8_bits, x, feedback=True),
        "quantise + dequantise, packed to 4 bits": functools.partial(in_4_bits, x),
    }
    for run in [copy_x, *paths.values()]:
        run()
    copies: list[float] = []
    ratios: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(KERNEL_ROUNDS):
        for path, run in paths.items():
            copies.append(seconds(copy_x))
            ratios[path].append(seconds(run) / copies[-1])
    print(json.dumps({"copy": statistics.median(copies), "ratios": ratios}))


def in_8_bits(x: Tensor, feedback: bool = False) -> None:
    scales = kernels.abs_max(x, BLOCK)
    codes = kernels.quantise(x, scales, LEVELS, BLOCK, key=1)
    kernels.dequantise(codes, scales, LEVELS, BLOCK)
    if feedback:
        kernels.quantisation_error(x, codes, scales, LEVELS, BLOCK)


def in_4_bits(x: Tensor) -> None:
    layout = kernels.Layout(x.numel(), bits=4, block=BLOCK)
    kernels.decode(kernels.encode(x, 1, layout, key=1), layout, x.numel())


def seconds(run: Step) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


# ---- steps, on the hosts


def measure_steps(options: argparse.Namespace) -> None:
    """On one rank: print the seconds and the wire bytes of each kind of step."""
    torch.set_num_threads(1)
    with tw.join("gloo", device="cpu") as comm:
        torch.manual_seed(0)
        model = registry.build("models", options.model, (3, 32, 32), 10)
        torch.manual_seed(1 + comm.rank)
        batch = torch.randn(options.batch_size, 3, 32, 32), torch.randint(0, 10, (options.batch_size,))
        kinds = {**torch_steps(model, batch), **our_steps(options.reducers, model, batch, comm)}
        counts = {kind: warm_up(step, options.steps, comm) for kind, step in kinds.items()}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        sent: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, step in kinds.items():
                took, num_bytes = timed(step, counts[kind], comm)
                times[kind].append(took)
                sent[kind].append(num_bytes)
        if comm.rank == 0:
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            print(json.dumps({"bytes": size, "times": times, "sent": sent}))


def torch_steps(model: nn.Module, batch: Batch) -> dict[str, Step]:
    half = ddp(copy.deepcopy(model))
    half.register_comm_hook(None, fp16_compress_hook)
    low_rank = ddp(copy.deepcopy(model), bucket_cap_mb=1000)  # with two buckets its hook hangs
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=WARMUP_STEPS - 1)
    low_rank.register_comm_hook(state, powerSGD_hook)
    return {
        "no exchange": plain_step(copy.deepcopy(model), batch),
        "DDP": plain_step(ddp(copy.deepcopy(model)), batch),
        "DDP, fp16_compress_hook": plain_step(half, batch),
        "DDP, powerSGD_hook, rank 4": plain_step(low_rank, batch),
    }


def our_steps(reducers: list[str], model: nn.Module, batch: Batch, comm: tw.Comm) -> dict[str, Step]:
    steps: dict[str, Step] = {}
    for reducer in reducers:
        spec = f"data_parallel(reducer={reducer})"
        trainer = tw.prepare(spec, model=copy.deepcopy(model), optimizer=sgd, loss=loss, comm=comm)
        steps[reducer] = functools.partial(trainer.step, batch)
    return steps


def plain_step(model: nn.Module, batch: Batch) -> Step:
    optimizer = sgd(model.parameters())

    def step() -> None:
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.001)  # type: ignore[arg-type]


loss = nn.functional.cross_entropy


def warm_up(step: Step, most: int, comm: tw.Comm) -> int:
    """Warm up, and return how many steps a round should have, the same on every rank."""
    timed(step, WARMUP_STEPS - 1, comm)
    took, _ = timed(step, 1, comm)
    slowest = comm.max(torch.tensor([took])).item()
    return max(1, min(most, int(ROUND_SECONDS / slowest)))


def timed(step: Step, count: int, comm: tw.Comm) -> tuple[float, float]:
    """Seconds and wire bytes of a step."""
    comm.barrier()
    before, begin = comm.ledger.wire_bytes, time.perf_counter()
    for _ in range(count):
        step()
    num_bytes = comm.ledger.wire_bytes - before
    comm.barrier()
    return (time.perf_counter() - begin) / count, num_bytes / count


# ---- on the machine


def report(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:  # for what is compiled
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        if options.only != "steps":
            report_kernels(env)
        if options.only != "kernels":
            for link in options.links:
                report_steps(options, link, env)


def report_kernels(env: dict[str, str]) -> None:
    command = [sys.executable, __file__, "--role", "kernels"]
    found = {}
    for kind in ("eager", "compiled"):  # each in a process of its own, because the choice is for the life of one
        ended = subprocess.run(
            command, env={**env, "THINWIRE_KERNELS": kind}, stdout=subprocess.PIPE, text=True, check=True
        )
        found[kind] = json.loads(ended.stdout)
    print(f"{VECTOR_MIB} MiB of float32, blocks of {BLOCK}, one thread, torch {torch.__version__}: × one memory copy")
    heads = [f"{kind} (a copy: {1e3 * f['copy']:.1f} ms)" for kind, f in found.items()]
    print(" " * 40 + "".join(f"{head:>28}" for head in heads))
    for path in found["eager"]["ratios"]:
        columns = "".join(f"{spread(f['ratios'][path], '.1f'):>28}" for f in found.values())
        print(f"{path:>40}{columns}  {GOALS.get(path, '')}".rstrip())


def report_steps(options: argparse.Namespace, link: str, env: dict[str, str]) -> None:
    found, measured = on_hosts(options, link, env)
    base = statistics.median(found["times"]["DDP"])
    exact = all_reduce_bytes(found["bytes"], options.ranks)
    print(
        f"\nlink {link}, measured {measured.rate_mbit:.0f} Mbit/s; {options.ranks} hosts, {options.model}, "
        f"{found['bytes'] / 1e6:.1f} MB of gradients, batch {options.batch_size} a rank, "
        f"kernels {env.get('THINWIRE_KERNELS', 'eager')}"
    )
    floor = 8e-3 * exact / netlab.parse_link(link).rate_mbit
    print(f"in float32 each rank sends {exact / 1e6:.1f} MB a step, {floor:.0f} ms on the wire")
    for kind, times in found["times"].items():
        line = f"{kind:>40}  {spread([1e3 * t for t in times], '.0f'):>20} ms a step"
        line += f"  {statistics.median(times) / base:6.3f} × DDP"
        if kind in options.reducers:
            sent = statistics.mean(found["sent"][kind])
            line += f"  {sent / 1e6:6.2f} MB sent = {sent / exact:.4f} × float32"
        print(line)


def spread(values: list[float], form: str) -> str:
    """The median as text, and in brackets the smallest and the largest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def on_hosts(options: argparse.Namespace, link: str, env: dict[str, str]) -> tuple[dict[str, Any], Any]:
    """The measurements of rank 0, with one rank on each host, and the measured link."""
    with netlab.hosts(options.ranks, link) as hosts, ExitStack() as started:
        measured = hosts.measure()
        world = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        env = {**env, **world, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, __file__, *sys.argv[1:], "--role", "rank"]
        ranks = []
        for number, host in enumerate(hosts):
            rank = host.start(command, env={**env, "RANK": str(number)}, stdout=subprocess.PIPE, text=True)
            ranks.append(started.enter_context(rank))  # waits for the rank at the end,
            started.callback(rank.kill)  # which is killed before that, whatever happened
        outputs = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks)
    return json.loads(outputs[0]), measured


if __name__ == "__main__":
    main()
