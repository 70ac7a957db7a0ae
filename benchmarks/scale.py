"""Scale on paper: which method, how many seconds and bytes, and what breaks first, at up to 1,024 ranks.

python benchmarks/scale.py --json docs/scale.json     # some minutes; goes on where it was stopped
python benchmarks/scale.py --render                   # docs/scale.md from docs/scale.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import Dataset

from thinwire.comm.world import place
from thinwire.common.formats import format_bytes
from thinwire.config import RunConfig
from thinwire.netlab.link import Link
from thinwire.plan.measured import is_safe, qualities
from thinwire.plan.planner import study
from thinwire.plan.wire import Frames, Wire
from thinwire.plan.workload import TaskWorkload
from thinwire.tasks.base import Task

DOCS = Path(__file__).parent.parent / "docs"
STRATEGIES = [
    "data_parallel", "data_parallel(reducer=bf16)", "data_parallel(reducer=maxnorm)",
    "data_parallel(reducer=maxnorm(bits=4))", "data_parallel(reducer=error_feedback(maxnorm(bits=4)))",
    "data_parallel(reducer=powersgd(rank=4))", "local_sgd", "diloco", "diloco(fragments=4)",
    "diloco(fragments=4, reducer=maxnorm(bits=4))", "daso(warmup_epochs=1, cooldown_epochs=1)",
]  # fmt: skip
RANKS, RANKS_PER_NODE = [8, 64, 512, 1024], 8
RATES = [100.0, 1_000.0, 10_000.0, 100_000.0]
LATENCY_MS, FLOPS_PER_SECOND, GPU_BYTES = 0.05, 150e12, 80e9
STEPS = 32  # of an epoch
LARGE_PARAMETERS = 10**9  # daso has a kind of rank for each place in a node; recording them all takes minutes here


class Same(Dataset):
    """The same sample again and again: what is sent does not depend on it."""

    def __init__(self, sample, count: int) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.sample


def images(batch: int, ranks: int) -> Task:
    data = Same((torch.zeros(3, 56, 56), torch.tensor(0)), batch * ranks * STEPS)
    return Task(data, data, (3, 56, 56), 1000, "resnet50")


def tokens(context: int, model: str, batch: int, ranks: int) -> Task:
    sample = torch.zeros(context, dtype=torch.int64)
    data = Same((sample, sample), batch * ranks * STEPS)
    loss = lambda out, y: torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    return Task(data, data, (context,), 50257, model, loss, metric="loss")


MODELS = {
    "ResNet-50, 64 images of 56 × 56": (lambda ranks: images(64, ranks), 64, "sgd"),
    "GPT 124 M, 8 × 1,024 tokens": (
        lambda ranks: tokens(1024, "gpt(width=768, depth=12, heads=12)", 8, ranks), 8, "adamw",
    ),
    "GPT 1.3 B, 8 × 2,048 tokens": (
        lambda ranks: tokens(2048, "gpt(width=2048, depth=24, heads=16)", 8, ranks), 8, "adamw",
    ),
    "GPT 7 B, 4 × 2,048 tokens": (
        lambda ranks: tokens(2048, "gpt(width=4096, depth=32, heads=32)", 4, ranks), 4, "adamw",
    ),
}  # fmt: skip


def cells(model: str, ranks: int) -> list[dict]:
    """The forecasts of all strategies for a model and a number of ranks, on each link."""
    make, batch, optimizer = MODELS[model]
    config = RunConfig(batch_size=batch, epochs=10, optimizer=optimizer, lr=1e-3, schedule="constant", autocast=True)
    workload = TaskWorkload(config, make(ranks), FLOPS_PER_SECOND)
    nodes = place(ranks, max(2, ranks // RANKS_PER_NODE))
    found = []
    is_large = sum(p.numel() for p in workload.meta_model.parameters()) > LARGE_PARAMETERS
    for spec in [one for one in STRATEGIES if not (is_large and one.startswith("daso"))]:
        begin = time.monotonic()
        studied = study(spec, workload, nodes, seconds=0.3)
        for rate in RATES:
            wire = Wire(Link(rate, LATENCY_MS), Frames(), hop_seconds=2e-5)
            f = studied.forecast(wire)
            quick = studied.forecast(replace(wire, link=Link(rate, 0.0), hop_seconds=0.0))
            found.append({
                "model": model, "ranks": ranks, "nodes": len(set(nodes)), "mbit": rate, **f._asdict(),
                "latency_share": max(0.0, 1 - quick.seconds_per_step / f.seconds_per_step),
                "computing_seconds": workload.step_cost[0] / FLOPS_PER_SECOND,
                "parameters": sum(p.numel() for p in workload.meta_model.parameters()),
            })  # fmt: skip
        print(f"{model}, {ranks} ranks, {spec}: {time.monotonic() - begin:.1f} s", flush=True)
    return found


def rate_text(mbit: float) -> str:
    return f"{mbit / 1e3:g} Gbit/s" if mbit >= 1e3 else f"{mbit:g} Mbit/s"


def breaks(cell: dict) -> str:
    """What would break first, and what to change."""
    if cell["memory_bytes"] > GPU_BYTES:
        return f"memory: {format_bytes(cell['memory_bytes'])} a rank; shard the model inside nodes"
    if cell["latency_share"] > 0.3:
        return (
            f"latency: {cell['latency_share']:.0%} of a step is hops of rings; rings inside nodes and trees between "
            "them, or fewer and larger messages"
        )
    if cell["waiting_share"] > 0.5:
        return f"the network: {cell['waiting_share']:.0%} of a step is waiting; exchange less often"
    return "nothing: it computes most of the time"


def render(rows: list[dict]) -> str:
    """docs/scale.md."""
    lines = [
        "# Scale on paper", "",
        "After reading this page you know which method would be fastest with 8 to 1,024 ranks, and what would break",
        "first. **Nothing here was run at this size.** The figures are forecasts of `thinwire plan`'s engine: each",
        "strategy's own code was recorded on ranks that do not exist, and replayed on a model of the network. The",
        "engine is checked against runs of 2 to 4 ranks only ([plan.md](plan.md)).", "",
        f"Assumed: {FLOPS_PER_SECOND / 1e12:g} TFLOP/s a rank, {RANKS_PER_NODE} ranks a node (8 ranks: 2 nodes),",
        f"one link a node with {LATENCY_MS} ms of latency, 12 Gbit/s inside a node for all its ranks (gloo goes",
        f"through the host's memory), a GPU of {GPU_BYTES / 1e9:g} GB, gloo's rings, activations kept. Coding is timed",
        "on a CPU, and taken to be as much faster on a GPU as computing is. Accuracy is another matter: *safe* is the",
        "fastest strategy that lost at most 0.5 points wherever it was measured with the same optimizer: SGD for",
        "ResNet-50, AdamW for GPTs ([results.md](results.md)).",
        "`daso` was left out for models of more than 10⁹ parameters. A small model is timed in place of a large one,",
        "next to other work, so computing may be wrong by half: some steps are shorter than computing alone is.", "",
        "Made by `python benchmarks/scale.py --json docs/scale.json` and `python benchmarks/scale.py --render`.", "",
    ]  # fmt: skip
    for model in (one for one in MODELS if any(row["model"] == one for row in rows)):
        of_model = [row for row in rows if row["model"] == model]
        one = of_model[0]
        lines += [
            f"## {model} a rank", "",
            f"{one['parameters'] / 1e6:,.0f} M parameters; a step computes {one['computing_seconds']:.3g} s.", "",
            "| ranks | link of a node | data_parallel: s a step | fastest | s a step | GB a rank and step | safe "
            "| s a step | what breaks first, with the fastest |",
            "|--:|--:|--:|---|--:|--:|---|--:|---|",
        ]  # fmt: skip
        for ranks in dict.fromkeys(row["ranks"] for row in of_model):
            for mbit in dict.fromkeys(row["mbit"] for row in of_model):
                here = sorted(
                    (row for row in of_model if (row["ranks"], row["mbit"]) == (ranks, mbit)),
                    key=lambda row: row["seconds_per_step"],
                )
                plain = next(row for row in here if row["strategy"] == "data_parallel")
                best = here[0]
                optimizer = MODELS[model][2]
                safe = next(r for r in here if is_safe(r["strategy"], qualities(r["strategy"], optimizer), 0.5))
                lines.append(
                    f"| {ranks} | {rate_text(mbit)} | {plain['seconds_per_step']:.3g} | `{best['strategy']}` | "
                    f"{best['seconds_per_step']:.3g} | {best['wire_bytes_per_step'] / 1e9:.3g} | "
                    f"`{safe['strategy']}` | {safe['seconds_per_step']:.3g} | {breaks(best)} |"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=DOCS / "scale.json")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--only", default="", help="models whose name contains this")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text()) if args.json.exists() else []
    if args.render:
        (DOCS / "scale.md").write_text(render(rows))
        return
    torch.set_num_threads(1)
    for model in (one for one in MODELS if args.only in one):
        for ranks in RANKS:
            if any((row["model"], row["ranks"]) == (model, ranks) for row in rows):
                continue
            rows += cells(model, ranks)
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
