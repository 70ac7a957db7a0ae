"""A comparison on disk that looks like real training, for tests of what reads one."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from thinwire.compare.files import run_place
from thinwire.compare.results import Results, read_results
from thinwire.run.records import RunFolder
from thinwire.run.schema import SeriesSummary
from thinwire.strategies.ab import AB

DENSE = "data_parallel(bucket_mb=5)"
SPARSE = "data_parallel(reducer=error_feedback(global_randk(ratio=0.01)))"
LOW = "ab(cutoff=0.3)"
NASTY = "digits</script><script>alert(1)</script>&<!--"

# What a strategy does to a run: epochs until it has learnt most, where it ends, share of the bytes, seconds an epoch.
BEHAVIOUR = {
    DENSE: (2.0, 97.6, 1.0, 9.5),
    SPARSE: (4.5, 96.2, 0.012, 3.9),
    "data_parallel(reducer=error_feedback(topk(ratio=0.01)))": (3.2, 97.1, 0.045, 4.4),
    "local_sgd(every=8)": (2.8, 96.9, 0.125, 4.6),
    "powersgd(rank=2)": (2.4, 97.4, 0.06, 5.2),
}

RANK_SERIES = SeriesSummary(**AB.series["layer_ranks"]._asdict())


def write_run(
    run: RunFolder, spec: str, seed: int, *, epochs: int = 12, timeline: bool = True, layers: tuple[str, ...] = ("1",),
    **more: Any,
) -> None:  # fmt: skip
    """The files of a run that looks like training; `layers` are those that "ab" factors, `more` is for its summary."""
    patience, ceiling, share, pace = BEHAVIOUR.get(spec, (3.0, 96.0, 0.5, 5.0))
    chance, metric, ranks = random.Random(f"{spec}{seed}"), more.get("metric", "accuracy"), more.get("ranks", 4)
    run.path.mkdir(parents=True, exist_ok=True)
    sent = share * 130e6 * (ranks > 1)
    metrics = []
    for epoch in range(1, epochs + 1):
        accuracy = ceiling - 70 * math.exp(-epoch / patience) + chance.gauss(0, 2 / epoch + 0.15)
        row = {
            "step": 40 * epoch, "epoch": epoch, "seconds": epoch * pace * 1.1, "train_seconds": epoch * pace,
            "train_loss": 2 / epoch, "test_loss": 3 * (1 - accuracy / 100), "samples_per_second": 5000 / pace,
            "wire_bytes": round(sent * epoch + 9e5), "training_bytes": round(sent * epoch),
            "training_bytes_between": round(sent * epoch) // 2 * (ranks // 2), "waiting_seconds": 0.4 * epoch,
        }  # fmt: skip
        if spec.startswith("ab"):
            row |= rank_status(epoch, layers)
        metrics.append(row | ({"test_accuracy": accuracy} if metric == "accuracy" else {}))
    values = [row[f"test_{metric}"] for row in metrics]
    ledger = write_ledger(sent, epochs, ranks)
    total, between = (sum(r[k] for r in ledger if r["epoch"] == epochs) for k in ("wire_bytes", "between_bytes"))
    summary = {
        "task": "digits", "strategy": spec, "model": "mlp", "ranks": ranks, "nodes": 2, "link": "100mbit,10ms",
        "link_state": "shaped", "link_measured": {"rate_mbit": 95.1 + seed, "latency_ms": 10.06}, "seed": seed,
        "epochs": epochs, "steps": 40 * epochs, "samples": 1400 * epochs, "seconds": epochs * pace * 1.2,
        "train_seconds": epochs * pace + chance.gauss(0, 0.3), "metric": metric, "value": values[-1],
        "best": max(values) if metric == "accuracy" else min(values), "wire_bytes_per_rank": round(total / ranks),
        "wire_bytes_by_link": {"inside": total - between, "between": between},
        "wire_bytes_by_purpose": sent_for(ledger),
        "kernel_bytes_by_link": {"inside": total - between, "between": round(1.031 * between)},
        "waiting_share": 0.72 * share**0.4, "samples_per_second": 5000 / pace, "parameters": 101770,
        "peak_memory_bytes": 412_000_000 + round(share * 10**8),
        "versions": {"thinwire": "0.1.0", "torch": "2.11.0", "python": "3.12.4"},
    }  # fmt: skip
    run.append(run.metrics, metrics)
    run.append(run.ledger, ledger)
    run.append(run.timeline, write_timeline(share, ranks) if timeline else [])
    series = {"layer_ranks": RANK_SERIES.model_dump()} if spec.startswith("ab") else {}
    run.save_summary(summary | {"series": series} | more)


def rank_status(epoch: int, layers: tuple[str, ...]) -> dict[str, Any]:
    """What "ab" adds to an epoch's row: two epochs at full rank, then less and less, and less in later layers."""
    found = {name: [max(1, 256 // (1 if epoch < 3 else epoch + i)), 256] for i, name in enumerate(layers)}
    return {"phase": "warmup" if epoch < 3 else "ab", "layer_ranks": found}


def write_ledger(sent: float, epochs: int, ranks: int) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(1, epochs + 1):
        for rank in range(ranks):
            shares = {"train": sent * epoch, "eval": 9e3 * epoch, "checkpoint": 4e5 * epoch, "start": 4e5}
            for purpose, wire in shares.items():
                wire = round(wire) if ranks > 1 else 0
                between = wire // 2 if rank % 2 else 0
                about = {"step": 40 * epoch, "epoch": epoch, "rank": rank, "purpose": purpose, "link": "world"}
                counts = {"op": "all_reduce", "ranks": ranks, "calls": 40 * epoch, "payload_bytes": wire}
                rows.append(about | counts | {"wire_bytes": wire, "between_bytes": between, "seconds": 0.1})
    return rows


def sent_for(ledger: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Bytes by purpose and link at the end, as in a summary."""
    last = [row for row in ledger if row["epoch"] == ledger[-1]["epoch"]]
    return {
        purpose: {
            "inside": sum(row["wire_bytes"] - row["between_bytes"] for row in last if row["purpose"] == purpose),
            "between": sum(row["between_bytes"] for row in last if row["purpose"] == purpose),
        }
        for purpose in dict.fromkeys(row["purpose"] for row in last)
    }


def write_timeline(share: float, ranks: int) -> list[dict[str, Any]]:
    rows, chance = [], random.Random(0)
    for rank in range(ranks):
        begin = 0.002 * rank
        for step in range(40, 44):
            compute, wire = 0.05 + chance.random() * 0.006, 0.012 + 0.17 * share**0.5
            busy = max(compute, 0.3 * compute + wire)
            about = {"rank": rank, "step": step}
            rows.append(about | {"kind": "step", "name": "step", "begin": begin, "seconds": busy, "bytes": 0})
            rest = {"begin": begin + compute, "seconds": busy - compute, "bytes": 0}
            rows.append(about | {"kind": "waiting", "name": "all_reduce", **rest})
            for bucket in range(3):
                part = {"begin": begin + 0.3 * compute + bucket * wire / 3, "seconds": wire / 3 * 0.93}
                sent = {"bytes": round(share * 1e6)}
                rows.append(about | {"kind": "communication", "name": "all_reduce", **part, **sent})
            begin += busy + 0.001
    return rows


def compare(
    folder: Path, specs: list[str], seeds: tuple[int, ...] = (0, 1, 2), *, target: float | None = None,
    errors: dict[str, str] | None = None, unfinished: tuple[str, ...] = (), **more: Any,
) -> Results:  # fmt: skip
    """A comparison on disk, read back; runs in `errors` and `unfinished` leave nothing behind."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": 1, "specs": specs, "seeds": seeds, "errors": errors or {}, "target": target}
    command = f"thinwire compare {' '.join(repr(spec) for spec in specs)} --ranks 4 --link 100mbit,10ms"
    (folder / "compare.json").write_text(json.dumps(about | {"command": command}))
    for i, spec in enumerate(specs):
        for seed in seeds:
            place = run_place(i, spec, seed)
            if place not in about["errors"] and place not in unfinished:
                write_run(RunFolder(folder / place), spec, seed, **more)
    return read_results(folder)
