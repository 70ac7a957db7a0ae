"""How much memory does training take on each rank? The peak of a few steps, less what the process held before.

    torchrun --nproc-per-node 4 benchmarks/memory.py SPEC [--model resnet18] [--batch-size 64] [--steps 3] [--cuda]

Before the first step every rank has the whole model. The peak is that of the steps after it: weights, gradients,
optimizer, activations and messages in flight. On a CPU it is resident memory, on a GPU what torch allocated.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch

import thinwire as tw
from thinwire import registry
from thinwire.comm.collectives import all_gather_json

SHAPE, CLASSES = (3, 32, 32), 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if options.cuda else "cpu")
    with tw.join(device=device) as comm:
        empty = current_memory(device)
        torch.manual_seed(0)
        model = registry.build("models", options.model, SHAPE, CLASSES).to(device)
        trainer = tw.prepare(
            options.spec, model=model, comm=comm, loss=torch.nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, 0.01, 0.9),
        )  # fmt: skip
        del model
        inputs, targets = torch.randn(options.batch_size, *SHAPE), torch.randint(0, CLASSES, (options.batch_size,))
        trainer.step((inputs, targets))
        trainer.end_epoch()
        gc.collect()
        reset_peak_memory(device)
        trainer.begin_epoch(options.steps)
        for _ in range(options.steps):
            trainer.step((inputs, targets))
        trainer.end_epoch()
        found = all_gather_json(comm, [peak_memory(device) - empty, sum(p.numel() for p in trainer.model.parameters())])
        if comm.rank == 0:
            print(f"{options.spec}, {options.model}, batch {options.batch_size}, {device.type}")
            for rank, (num_bytes, parameters) in enumerate(found):
                print(f"rank {rank}: peak {num_bytes / 1e6:,.0f} MB, {parameters:,} parameters")


def current_memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _read_status("VmRSS")


def peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _read_status("VmHWM")


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _read_status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
