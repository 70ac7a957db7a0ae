"""A rank of benchmarks/long_runs.py: a long run, and what its process holds after every so many steps."""

from __future__ import annotations

import gc
import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import thinwire as tw
from thinwire.comm.base import Comm
from thinwire.comm.join import join
from thinwire.comm.ledger import Ledger
from thinwire.comm.world import find_world
from thinwire.common.files import write_text
from thinwire.config import RunConfig
from thinwire.errors import RunError
from thinwire.run.network import LinkReport
from thinwire.run.startup import use_device
from thinwire.run.worker import Run

EPOCH_STEPS, BATCH = 250, 8  # of a rank
STOP_AT = "LONG_RUNS_STOP_AT"  # the step at which the first process of a run is stopped; 0 = it runs to its end
SAMPLE_EVERY = "LONG_RUNS_SAMPLE_EVERY"
ATTACHED = "error_feedback(maxnorm(bits=4))"
ROUNDS = "diloco(every=8, fragments=2, wait=2)"


def net() -> nn.Module:
    """A model that every strategy takes, and whose step takes no time."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def tiny(data: Path | None, seed: int, /, *, ranks: int = 2) -> tw.Task:
    """Random samples of three classes, as many as EPOCH_STEPS steps of so many ranks take."""
    generator = torch.Generator().manual_seed(seed)
    count = EPOCH_STEPS * BATCH * ranks
    inputs = torch.randn(count + 96, 6, generator=generator)
    targets = inputs[:, :3].argmax(1)
    train, test = (TensorDataset(inputs[part], targets[part]) for part in (slice(count), slice(count, None)))
    return tw.Task(train, test, (6,), 3, net, defaults={"batch_size": BATCH, "lr": 0.02, "optimizer": "adamw"})


# ---- what a process holds


def held(ledger: Ledger) -> dict[str, int]:
    """Counts of what a process holds now, and its memory."""
    gc.collect()
    objects = gc.get_objects()
    timeline = ledger.timeline
    torch_groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    return {
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # one is for this listing
        "groups": torch_groups + sum(issubclass(type(one), Comm) for one in objects),
        "objects": len(objects),
        "tensors": sum(issubclass(type(one), Tensor) for one in objects),
        "ledger_totals": len(ledger.totals),
        "timeline_spans": len(timeline._spans) + len(timeline._operations),
        "temporary_files": sum(1 for _ in Path(tempfile.gettempdir()).iterdir()),
    }


class Log:
    """The samples of one rank, written to a file after each of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[dict[str, int]]()
        self.every = int(os.environ[SAMPLE_EVERY])

    def after(self, step: int, ledger: Ledger, folder: Path | None = None) -> None:
        """Take a sample if one is due."""
        if step % self.every == 0:
            self.rows.append({"step": step, **held(ledger), **on_disk(folder)})
            write_text(self.path, json.dumps(self.rows))


def on_disk(folder: Path | None) -> dict[str, int]:
    """The files of a run: their sizes, and how many there are."""
    if folder is None:
        return {}
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files if path.suffix == ".jsonl"}
    checkpoints = sum(path.stat().st_size for path in files if path.suffix == ".safetensors")
    return {"files": len(files), "checkpoint_bytes": checkpoints} | {
        f"{name}_bytes": sizes.get(f"{name}.jsonl", 0) for name in ("metrics", "ledger", "timeline")
    }


# ---- programs of a rank


class MeasuredRun(Run):
    """A run that looks at its own process after epochs, and may stop as if it failed."""

    log: Log | None = None

    def _end_epoch(self, is_complete: bool) -> None:
        super()._end_epoch(is_complete)
        assert self.config.out is not None
        self.log = self.log or Log(log_file(self.config, self.comm))
        self.log.after(self.at.step, self.comm.ledger, self.config.out)
        if self.at.step == int(os.environ.get(STOP_AT, "0")):
            raise RunError("stopped in order to be resumed")


def log_file(config: RunConfig, comm: Comm) -> Path:
    """Where a rank writes its samples: beside the folder of the run."""
    assert config.out is not None
    return config.out.parent / f"rank-{comm.rank}.json"


def trained(config: RunConfig, link: LinkReport, progress_file: Path | None) -> None:
    """What thinwire train does, measured."""
    device = use_device(config, find_world())
    with join("gloo", config.patience, device, config.iface) as comm:
        MeasuredRun(config, comm, device, link, progress_file).run()


def attached(config: RunConfig, link: LinkReport, progress_file: Path | None) -> None:
    """A loop of one's own with tw.attach."""

    def begin(model: nn.Module, comm: Comm) -> tuple[nn.Module, Any]:
        ddp = DistributedDataParallel(model)
        return ddp, tw.attach(ddp, ATTACHED, bucket_mb=0.001)

    own_loop(config, begin)


def in_rounds(config: RunConfig, link: LinkReport, progress_file: Path | None) -> None:
    """A loop of one's own with tw.rounds."""
    own_loop(config, lambda model, comm: (model, tw.rounds(model, ROUNDS, comm=comm)))


def own_loop(config: RunConfig, begin: Callable[[nn.Module, Comm], tuple[nn.Module, Any]]) -> None:
    """Train; load what was saved every 500 steps; end the exchange every 1,000 steps and begin another."""
    assert config.steps is not None
    inputs, targets = tiny(None, 0).train.tensors  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    with join("gloo", 60.0, "cpu") as comm:
        log = Log(log_file(config, comm))
        trained_model, exchange = begin(model, comm)
        for step in range(1, config.steps + 1):
            part = torch.randint(0, len(inputs), (BATCH,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained_model(inputs[part]), targets[part]).backward()
            optimizer.step()
            if trained_model is model:
                exchange.after_step()
            if step % 500 == 0:
                exchange.load_state_dict(exchange.state_dict())
            log.after(step, exchange.ledger)
            if step % 1000 == 0:
                exchange.close()
                trained_model, exchange = begin(model, comm)
        exchange.close()
