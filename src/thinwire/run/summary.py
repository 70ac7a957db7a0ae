"""summary.json: the results of a run, its bytes and its times."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.comm.ledger import LINKS, SentByPurpose, bytes_of
from thinwire.common.tensors import num_bytes
from thinwire.config import RunConfig
from thinwire.run.meters import sum_over_hosts
from thinwire.run.network import LinkReport
from thinwire.run.position import Position
from thinwire.run.schema import ArtifactSummary, SeriesSummary, Summary
from thinwire.strategies.base import Artifact, Strategy
from thinwire.tasks.metrics import Metric


def summarise(
    config: RunConfig, metric: Metric, at: Position, seconds: float, by_rank: Sequence[Mapping[str, Any]], *,
    link: LinkReport, nodes: int, parameters: int, model: nn.Module, artifacts: Sequence[tuple[Artifact, float]],
    strategy: Strategy, device: torch.device,
) -> Summary:  # fmt: skip
    """The summary of a run. `by_rank`: what each rank measured; `artifacts`: each with its metric."""
    assert at.value is not None
    assert at.best is not None
    return Summary(
        task=config.task, strategy=config.strategy, model=config.model or config.task, ranks=len(by_rank),
        nodes=nodes, link=config.link, seed=config.seed, epochs=at.begun_epochs, steps=at.step, samples=at.samples,
        seconds=seconds, train_seconds=at.train_seconds, metric=metric.name, value=at.value, best=at.best,
        higher_is_better=metric.higher_is_better,
        samples_per_second=at.samples / at.train_seconds if at.train_seconds else 0.0, parameters=parameters,
        peak_memory_bytes=max(one["peak_memory_bytes"] for one in by_rank), versions=versions(device),
        **_network_fields(by_rank, link), **_model_fields(model, artifacts, strategy),
    )  # fmt: skip


def _network_fields(by_rank: Sequence[Mapping[str, Any]], link: LinkReport) -> dict[str, Any]:
    sent = sent_by_purpose(by_rank)
    kernel = sum_over_hosts([one["kernel"] for one in by_rank])
    ranks = len(by_rank)
    return {
        **link.summary_fields,
        "waiting_share": sum(one["waiting_seconds"] / max(one["train_seconds"], 1e-9) for one in by_rank) / ranks,
        "wire_bytes_per_rank": round(bytes_of(sent) / ranks),
        "wire_bytes_by_link": {link: bytes_of(sent, links=(link,)) for link in LINKS},
        "wire_bytes_by_purpose": sent,
        "kernel_bytes_per_rank": round(sum(kernel.values()) / ranks) if kernel else None,
        "kernel_bytes_by_link": kernel,
    }


def _model_fields(model: nn.Module, artifacts: Sequence[tuple[Artifact, float]], strategy: Strategy) -> dict[str, Any]:
    same = [num_parameters(artifact.model) for artifact, _ in artifacts if artifact.computes_the_same]
    return {
        "parameters_consolidated": min([num_parameters(model), *same]),
        "model_bytes": _saved_bytes(model),
        "artifacts": [_artifact_summary(artifact, value, model) for artifact, value in artifacts],
        "status": strategy.status(),
        "series": {name: SeriesSummary(**series._asdict()) for name, series in strategy.series.items()},
    }


def _artifact_summary(artifact: Artifact, value: float, whole: nn.Module) -> ArtifactSummary:
    size = num_parameters(artifact.model)
    return ArtifactSummary(
        name=artifact.name, about=artifact.about, file=artifact.file, column=artifact.column, parameters=size,
        bytes=_saved_bytes(artifact.model), ratio=num_parameters(whole) / size, value=value,
    )  # fmt: skip


def sent_by_purpose(by_rank: Sequence[Mapping[str, Any]]) -> SentByPurpose:
    """The bytes that all ranks sent, from their ledgers; every other total is a sum of these."""
    sent: SentByPurpose = {}
    for row in (row for one in by_rank for row in one["ledger"]):
        part = sent.setdefault(row["purpose"], dict.fromkeys(LINKS, 0))
        part["between"] += row["between_bytes"]
        part["inside"] += row["wire_bytes"] - row["between_bytes"]
    return sent


def _saved_bytes(model: nn.Module) -> int:
    return sum(map(num_bytes, model.state_dict().values()))


def num_parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def versions(device: torch.device) -> dict[str, str]:
    """Versions and hardware that one needs to know to repeat a run."""
    cores = {"cores": str(len(os.sched_getaffinity(0)))}
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "thinwire": thinwire.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **cores,
        **gpu,
    }
