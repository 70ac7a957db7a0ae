"""summary.json: what a run reached, sent and cost, under stable keys."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import thinwire
from thinwire.comm.ledger import LINKS, SentByPurpose, bytes_of
from thinwire.common.tensors import num_bytes
from thinwire.config import RunConfig
from thinwire.run.meters import add_up
from thinwire.run.network import LinkReport
from thinwire.tasks.base import Task


class Small(NamedTuple):
    """A model that is smaller than the whole one, and its metric on the test set."""

    model: nn.Module
    value: float


def summarise(
    config: RunConfig, task: Task, link: LinkReport, *, epochs: int, steps: int, seconds: float, train_seconds: float,
    samples: int, value: float, best: float, parameters: int, consolidated: nn.Module, small: Small | None,
    exits: Sequence[Small], status: dict[str, Any],
    everyone: list[dict[str, Any]], nodes: int, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The summary of a run. `everyone` has what each rank knows of itself."""
    sent = sent_by_purpose(everyone)
    kernel = add_up([one["kernel"] for one in everyone])
    measured = {"rate_mbit": link.rate_mbit, "latency_ms": link.latency_ms} if link.rate_mbit is not None else None
    ranks = len(everyone)
    return {
        "task": config.task,
        "strategy": config.strategy,
        "model": config.model or config.task,
        "ranks": ranks,
        "nodes": nodes,
        "link": config.link,
        "link_state": link.state,
        "link_measured": measured,
        "seed": config.seed,
        "epochs": epochs,
        "steps": steps,
        "samples": samples,
        "seconds": seconds,
        "train_seconds": train_seconds,
        "metric": task.metric,
        "value": value,
        "best": best,
        "samples_per_second": samples / train_seconds if train_seconds else 0.0,
        "waiting_share": sum(one["waiting_seconds"] / max(one["train_seconds"], 1e-9) for one in everyone) / ranks,
        "wire_bytes_per_rank": round(bytes_of(sent) / ranks),
        "wire_bytes_by_link": {link: bytes_of(sent, links=(link,)) for link in LINKS},
        "wire_bytes_by_purpose": sent,
        "kernel_bytes_per_rank": round(sum(kernel.values()) / ranks) if kernel else None,
        "kernel_bytes_by_link": kernel,
        "parameters": parameters,
        "parameters_consolidated": count(small.model if small else consolidated),
        "model_bytes": _saved_bytes(consolidated),
        "factored": small and _about(small, consolidated),
        "exits": [{"parameters": count(exit.model), "value": exit.value} for exit in exits],
        "flops_per_sample": status.get("flops_per_sample"),
        "backprop_flops_per_sample": status.get("backprop_flops_per_sample"),
        "peak_memory_bytes": max(one["peak_memory_bytes"] for one in everyone),
        "versions": versions(device),
    }


def sent_by_purpose(everyone: list[dict[str, Any]]) -> SentByPurpose:
    """What all ranks sent, from their ledgers; every other total is a sum of these."""
    sent: SentByPurpose = {}
    for row in (row for one in everyone for row in one["ledger"]):
        part = sent.setdefault(row["purpose"], dict.fromkeys(LINKS, 0))
        part["between"] += row["between_bytes"]
        part["inside"] += row["wire_bytes"] - row["between_bytes"]
    return sent


def _about(small: Small, whole: nn.Module) -> dict[str, Any]:
    size = count(small.model)
    return {"parameters": size, "ratio": count(whole) / size, "bytes": _saved_bytes(small.model), "value": small.value}


def _saved_bytes(model: nn.Module) -> int:
    return sum(map(num_bytes, model.state_dict().values()))


def count(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def versions(device: torch.device) -> dict[str, str]:
    """What a reader needs to know to repeat a run."""
    cores = {"cores": str(len(os.sched_getaffinity(0)))}
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "thinwire": thinwire.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **cores,
        **gpu,
    }
