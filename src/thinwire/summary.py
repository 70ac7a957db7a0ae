"""summary.json: what a run reached, sent and cost, under stable keys."""

from __future__ import annotations

import platform
import resource
from collections import Counter
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.config import RunConfig
from thinwire.tasks.base import Task


def summarise(
    config: RunConfig, task: Task, *, steps: int, seconds: float, train_seconds: float, value: float, best: float,
    parameters: int, consolidated: nn.Module, ledgers: list[list[dict[str, Any]]], peaks: list[int],
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The summary of a run. `ledgers` and `peaks` have one entry per rank."""
    by_link: Counter[str] = Counter()
    for row in (row for ledger in ledgers for row in ledger):
        by_link[row["link"]] += row["wire_bytes"]
    return {
        "task": config.task,
        "strategy": config.strategy,
        "model": config.model or config.task,
        "ranks": len(ledgers),
        "nodes": 1,
        "link": None,
        "seed": config.seed,
        "epochs": config.epochs,
        "steps": steps,
        "seconds": seconds,
        "train_seconds": train_seconds,
        "metric": task.metric,
        "value": value,
        "best": best,
        "wire_bytes_per_rank": round(by_link.total() / len(ledgers)),
        "wire_bytes_by_link": dict(by_link),
        "kernel_bytes_per_rank": None,
        "parameters": parameters,
        "parameters_consolidated": count(consolidated),
        "peak_memory_bytes": max(peaks),
        "versions": versions(device),
    }


def count(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def versions(device: torch.device) -> dict[str, str]:
    """What a reader needs to know to repeat a run."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"thinwire": thinwire.__version__, "torch": torch.__version__, "python": platform.python_version(), **gpu}


def peak_memory(device: torch.device) -> int:
    """The most memory this rank has held: of its GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
