"""The golden runs: which they are, and what is kept of each."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import platform
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import ProcessWorlds
from thinwire import registry
from thinwire.comm.base import Comm

FILES = Path(__file__).parent / "files"
STRATEGIES = {
    "data_parallel": ["data_parallel"],
    "alone": ["alone"],
    "local_sgd": ["local_sgd(every=3)", "local_sgd(every=2, reducer=error_feedback(maxnorm(bits=4)))"],
    "diloco": ["diloco(every=4)", "diloco(every=4, fragments=2)", "diloco(every=4, wait=2, reducer=powersgd(rank=1))"],
    "daso": [
        "daso(warmup_epochs=1, cooldown_epochs=1)",
        "daso(warmup_epochs=0, cooldown_epochs=0, merge=delta, max_global_skips=2, reducer=mean)",
    ],
    "ab": [
        "ab(sync_every=3, warmup=1, cutoff=0.7)",
        "ab(sync_every=4, warmup=2, rebound=2, climb=0, cutoff=0.6, sync=stale, moments=rotate)",
        "ab(sync_every=3, warmup=0, cutoff=0.7, sync=full, moments=slice, reducer=error_feedback(maxnorm(bits=4)))",
    ],
    "ist": ["ist(local_steps=3)", "ist(local_steps=2, scale=train, optimizer_state=reset, shares=[3, 2, 2, 1])"],
    "local_parallel": [
        "local_parallel(blocks=2)",
        "local_parallel(blocks=2, window=2, microbatches=2, wire=bf16, head=readout(every=2), reducer=maxnorm)",
        "local_parallel(blocks=4, window=2, head=predsim, losses=farthest)",
    ],
    "sequence": [
        "sequence([local_sgd(every=3), data_parallel(reducer=maxnorm(bits=4))], [1, 2])",
        "sequence([ab(sync_every=3, warmup=1, cutoff=0.7), diloco(every=4)], [0.67, 0.33], schedule=part)",
    ],
    "pipeline": ["pipeline(blocks=2)", "pipeline(blocks=2, schedule=gpipe, microbatches=2, reducer=maxnorm(bits=4))"],
}
REDUCERS = {
    "mean": ["mean"],
    "half": ["fp16", "bf16"],
    "maxnorm": ["maxnorm", "maxnorm(bits=4)", "error_feedback(maxnorm(bits=2))", "maxnorm_multiscale"],
    "powersgd": ["powersgd(rank=1)", "powersgd(rank=2)"],
    "sparse": ["global_randk(ratio=0.25)", "topk(ratio=0.25)", "error_feedback(topk(ratio=0.25))"],
    "signs": ["sign", "error_feedback(sign)", "terngrad"],
    "wrappers": ["partition(maxnorm(bits=4), vectors=bf16)", "warmup(maxnorm(bits=4), steps=3)"],
}
ON_PROCESSES = {"pipeline": 2}  # ranks of what does not run on threads
RANKS, NODES = 4, 2
EPOCHS, STEPS, BATCH = 3, 5, 16


def strategies() -> dict[str, list[str]]:
    """The specs of each file of a strategy; one that has none here is run with its defaults."""
    return {name: [name] for name in registry.TABLE["strategies"]} | STRATEGIES


def reducers() -> dict[str, list[str]]:
    """The specs of each file of reducers; one that has none here has a file of its own."""
    named = {name for specs in REDUCERS.values() for spec in specs for name in re.findall(r"\w+", spec)}
    return REDUCERS | {name: [name] for name in registry.TABLE["reducers"] if name not in named}


def names() -> list[str]:
    """The files, without their folder and ending."""
    return [*strategies(), *(f"reducer-{name}" for name in reducers())]


def record(name: str, processes: ProcessWorlds | None) -> list[dict[str, Any]]:
    """Run what a file is about; processes are needed for those in ON_PROCESSES."""
    if name.startswith("reducer-"):
        specs = [
            f"data_parallel(reducer={spec}, bucket_mb=0.002)" for spec in reducers()[name.removeprefix("reducer-")]
        ]
    else:
        specs = strategies()[name]
    runs = []
    for spec in specs:
        if name in ON_PROCESSES:
            assert processes is not None
            ranks = processes.run(train, ON_PROCESSES[name], spec)
        else:
            ranks = tw.simulate(lambda comm, spec=spec: train(comm, spec), ranks=RANKS, nodes=NODES)  # type: ignore[misc]
        runs.append({"losses": [one["losses"] for one in ranks], **_all_ranks(ranks)})
    return runs


def _all_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    assert len({one["weights"] for one in ranks}) == 1
    purposes = sorted({purpose for one in ranks for purpose in one["wire_bytes"]})
    sent = {purpose: [one["wire_bytes"].get(purpose, 0) for one in ranks] for purpose in purposes}
    return {"wire_bytes": sent, "weights": ranks[0]["weights"]}


def train(comm: Comm, spec: str) -> dict[str, Any]:
    """One rank's run."""
    trainer = tw.prepare(
        spec, model=copy.deepcopy(MODEL), comm=comm, loss=nn.functional.cross_entropy, epochs=EPOCHS,
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), schedule=lambda step: 0.95**step, clip_norm=5.0,
    )  # fmt: skip
    losses = []
    for epoch in range(EPOCHS):
        for x, y in tw.epoch(trainer, batches(epoch, trainer.shard), comm):
            losses.append(_kept(trainer.step((x, y))))
    weights = hashlib.sha256()
    for key, tensor in trainer.consolidate().state_dict().items():
        weights.update(key.encode() + tensor.detach().contiguous().numpy().tobytes())
    sent: dict[str, int] = {}
    for row in comm.ledger.rows():
        sent[row["purpose"]] = sent.get(row["purpose"], 0) + row["wire_bytes"]
    return {"losses": losses, "wire_bytes": sent, "weights": weights.hexdigest()}


def _kept(loss: Tensor) -> str:
    """All bits of a loss, as text."""
    return "nan" if math.isnan(loss.item()) else loss.item().hex()


def batches(epoch: int, shard: tw.Shard) -> list[tuple[Tensor, Tensor]]:
    """This shard's part of each batch of an epoch."""
    generator = torch.Generator().manual_seed(epoch)
    whole = [
        (torch.randn(BATCH, 1, 4, 4, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]
    return [(x[shard.index :: shard.count], y[shard.index :: shard.count]) for x, y in whole]


def _model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(128, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5),
        )  # fmt: skip


MODEL = _model()  # once: threads share torch's random state


def arithmetic() -> str:
    """What the last bits depend on. Elsewhere, losses are only nearly the same, and weights are another hash.

    The processor is a part of it: MKL and oneDNN compute otherwise on Intel's than on AMD's with the same instructions.
    """
    version, instructions = torch.__version__.partition("+")[0], torch.backends.cpu.get_cpu_capability()
    return f"torch {version}, {instructions}, {_processor()}"


def _processor() -> str:
    """The processor's name as Linux says it, or the kind of machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def stored(name: str) -> dict[str, Any]:
    """What a file says; of a file that is not there, nothing."""
    path = FILES / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"arithmetic": "", "runs": []}
    return found


def as_text(runs: list[dict[str, Any]]) -> str:
    """The text of a file: a line for each rank's losses."""
    lines = json.dumps({"arithmetic": arithmetic(), "runs": runs}, indent=1)
    return _joined(lines) + "\n"


def _joined(lines: str) -> str:
    """Lists of plain values on one line."""
    kept: list[str] = []
    for line in lines.splitlines():
        plain = not line.rstrip(",").endswith(("[", "{", "}", "]")) and ": " not in line
        closes = line.strip().rstrip(",") == "]" and kept and not kept[-1].rstrip(",").endswith(("]", "}"))
        if plain or closes:
            kept[-1] += ("" if kept[-1].endswith("[") or closes else " ") + line.strip()
        else:
            kept.append(line)
    return "\n".join(kept)
