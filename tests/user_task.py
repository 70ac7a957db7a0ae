"""A task of a user's own, with everything random that training can have, and a fault on request."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from thinwire.tasks.base import Task
from thinwire.tasks.digits import digits


def net() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )


def noisy(
    data: Path | None,
    seed: int,
    /,
    *,
    fault: str = "none",  # raise, kill, nan or slow: what happens
    rank: int = 0,  # where
    step: int = -1,  # at which of this process's steps
    once: str = "",  # a file that marks that it has happened
) -> Task:
    """Digits with random noise on the inputs and dropout in the model."""
    base = digits(data, seed)
    steps = 0

    def transform(inputs: Tensor, generator: Generator | None) -> Tensor:
        nonlocal steps
        if generator is None:
            return inputs
        steps += 1
        if fault == "slow":
            time.sleep(0.05)
        elif steps == step and int(os.environ.get("RANK", "0")) == rank and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            _happen(fault)
            if fault == "nan":
                return inputs * float("nan")
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)

    defaults = {"epochs": 2, "batch_size": 32, "lr": 0.05}
    return Task(base.train, base.test, base.shape, base.classes, net, transform=transform, defaults=defaults)


class MaskedNet(nn.Module):
    """The mean over the words of a sentence that are not padding, and a classifier. Returns its loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.classify = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        words = self.words(ids) * mask.unsqueeze(-1)
        logits = self.classify(words.sum(1) / mask.sum(1, keepdim=True))
        found = {"logits": logits, "size": logits.square().mean()}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of sentences of different lengths, with a mask."""
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True, padding_value=19)
    lengths = torch.tensor([len(sample["ids"]) for sample in samples])
    mask = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).float()
    return {"ids": ids, "mask": mask, "labels": torch.tensor([sample["label"] for sample in samples])}


def weighted(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A loss of (model, batch): cross-entropy, and a term that keeps outputs small."""
    found = model(ids=batch["ids"], mask=batch["mask"])
    entropy = nn.functional.cross_entropy(found["logits"], batch["labels"])
    return {"loss": entropy + 0.01 * found["size"], "entropy": entropy, "size": found["size"]}


def sometimes(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, and a number of some batches only: those whose first sentence has the class 1."""
    found = weighted(model, batch)
    return found | ({"three": torch.tensor(3.0)} if batch["labels"][0] == 1 else {})


LOSSES = {"own": None, "weighted": weighted, "sometimes": sometimes}


def sentences(
    data: Path | None,
    seed: int,
    /,
    *,
    loss: str = "own",  # own, weighted or sometimes
) -> Task:
    """Sentences of 1 to 8 words in dicts; their class is whether the sum of their words is large."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (600,), generator=generator).tolist()
    ids = [torch.randint(0, 19, (length,), generator=generator) for length in lengths]
    samples = [{"ids": one, "label": int(one.float().mean() > 9)} for one in ids]
    return Task(
        samples[:500], samples[500:], (), 0, MaskedNet, loss=LOSSES[loss], metric="loss",
        collate_fn=pad, defaults={"epochs": 2, "batch_size": 25, "lr": 0.05},
    )  # type: ignore[arg-type]  # fmt: skip


CHANGING = {"SAMPLES": 1000, "WIDTH": 132}


def changing(data: Path | None, seed: int, /) -> Task:
    """A task whose data and model change behind its name."""
    base = digits(data, seed)
    train = torch.utils.data.Subset(base.train, range(CHANGING["SAMPLES"]))
    model = f"mlp(width={CHANGING['WIDTH']})"
    return Task(train, base.test, base.shape, base.classes, lambda: Task.build_model(base, model))


def _happen(fault: str) -> None:
    if fault == "exit":
        sys.exit()
    if fault == "vanish":
        os._exit(0)
    if fault == "raise":
        raise ZeroDivisionError("a fault of the user's own")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "busy":
        time.sleep(4)
    if fault == "listeners":
        print("LISTENING", *sorted(_listeners()), file=sys.stderr, flush=True)
        print("THREADS", torch.get_num_threads(), file=sys.stderr, flush=True)


def _listeners() -> set[str]:
    """Addresses that processes of this run listen on, as the kernel writes them."""
    inodes = set()
    for pid in (os.getpid(), *_ancestors(os.getppid())):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd) if fd.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses


def _ancestors(pid: int) -> list[int]:
    """The fork server and the launcher."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [pid, parent]


def one_argument(z: object) -> object:
    """A head that is none."""
    return z
