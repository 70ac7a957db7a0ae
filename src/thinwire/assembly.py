"""The whole network from its homes: at once, layer by layer as it runs, or into files."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.checkpoint import save_tensors
from thinwire.comm.base import Comm, in_one_go, num_bytes
from thinwire.errors import UsageError
from thinwire.homes import Homes
from thinwire.records import write_text
from thinwire.surgery.slices import filled, tensors_of
from thinwire.surgery.standard import standard

Factors = Mapping[str, float]  # what some tensors are multiplied by


@torch.no_grad()
def assembled(model: nn.Module, homes: Homes, factors: Factors) -> nn.Module:
    """The whole network on every rank. Collective."""
    whole = filled(model, {name: _times(t, factors.get(name)) for name, t in homes.whole()})
    return standard(whole)


class Streamed(nn.Module):
    """The whole network, of which each rank holds one layer at a time.

    A layer's parameters are fetched from their homes when it is about to run and dropped afterwards. All ranks must
    run it equally often. Buffers, which are small, are there all the time.
    """

    def __init__(self, model: nn.Module, homes: Homes, factors: Factors) -> None:
        super().__init__()
        self.homes, self.factors, self.renamed = homes, factors, _standard_names(model)
        buffers = [name for name, t in tensors_of(model).items() if not isinstance(t, nn.Parameter)]
        self.model = filled(model, dict(homes.whole(buffers)))
        known = {id(p): name for name, p in self.model.named_parameters()}
        self.names = {
            module: {key: known[id(p)] for key, p in module._parameters.items() if p is not None}
            for module in self.model.modules()
        }
        for module, names in self.names.items():
            if names:
                module.register_forward_pre_hook(self._fetch)
                module.register_forward_hook(self._drop, always_call=True)

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def _fetch(self, module: nn.Module, inputs: Any) -> None:
        names = self.names[module]
        with self.homes.comm.ledger.purpose("eval"):
            tensors = dict(self.homes.whole(dict.fromkeys(names.values())))
        for key, name in names.items():
            module._parameters[key] = nn.Parameter(_times(tensors[name], self.factors.get(name)), requires_grad=False)

    def _drop(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for key in self.names[module]:
            module._parameters[key] = nn.Parameter(module._parameters[key].to("meta"), False)  # type: ignore[union-attr]


@torch.no_grad()
def calibrate(model: nn.Module, recent: Iterable[Tensor], comm: Comm, autocast: bool) -> None:
    """Measure BatchNorm's statistics of a whole network, whose sums have more terms than narrow ones. Collective.

    Each rank runs it on its own inputs; what they find is averaged over ranks. With no inputs anywhere, or somewhere
    if the network is streamed, statistics stay as they are.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms or comm.size == 1:
        return
    inputs = list(recent)
    if isinstance(model, Streamed):
        inputs = inputs[: int(comm.min(torch.tensor([len(inputs)])))]
    total = int(comm.sum(torch.tensor([len(inputs)])))
    if not total:
        return
    before = {norm: (norm.momentum, norm.training, norm.num_batches_tracked) for norm in norms}
    was_training = model.training
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum, norm.num_batches_tracked = None, torch.zeros_like(before[norm][2])  # type: ignore[arg-type]
    for x in inputs:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            model(x)
    statistics = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
    in_one_go(statistics, lambda flat: comm.sum(flat * (len(inputs) / total)))
    model.train(was_training)
    for norm, (momentum, training, tracked) in before.items():
        norm.momentum, norm.training, norm.num_batches_tracked = momentum, training, tracked


@torch.no_grad()
def export(folder: Path, model: Streamed, max_bytes: int = 10**9, *, replace: bool = False) -> None:
    """Write the whole network as safetensors files with an index, none much larger than so many bytes. Collective.

    Rank 0 writes, and holds one file's tensors at a time. Names and format are those of any sharded model.
    """
    homes, comm = model.homes, model.homes.comm
    exists = comm.rank == 0 and folder.exists() and not replace
    if int(comm.max(torch.tensor([exists], dtype=torch.uint8))):
        raise UsageError(f"export: {folder} exists already; choose a new folder")
    buffers = {name: t for name, t in tensors_of(model.model).items() if not isinstance(t, nn.Parameter)}
    files = _files(homes, max_bytes)
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        tensors = {
            model.renamed[name]: buffers[name] if name in buffers else _times(t, model.factors.get(name))
            for name, t in homes.whole(names, root=0)
        }
        if comm.rank == 0:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            save_tensors(tensors, new / file)
            index |= dict.fromkeys(tensors, file)
    if comm.rank == 0:
        about = {"metadata": {"total_size": homes.num_bytes}, "weight_map": index}
        write_text(new / "model.safetensors.index.json", json.dumps(about, indent=1))
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def free_bytes(device: torch.device, comm: Comm) -> float:
    """How much room this rank has; those on one node share it."""
    neighbours = comm.nodes.count(comm.nodes[comm.rank])
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / max(1, neighbours // torch.cuda.device_count())
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return 1024 * int(found[1]) / neighbours if found else float("inf")


def _files(homes: Homes, max_bytes: int) -> list[list[str]]:
    files: list[list[str]] = []
    room = 0
    for name, tensor in homes.slices.tensors.items():
        if not files or num_bytes(tensor) > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= num_bytes(tensor)
    return files


def _standard_names(model: nn.Module) -> dict[str, str]:
    """What tensors are called in the model as torch has it, without what surgery put in."""
    twin = copy.deepcopy(model)
    before = {id(t): name for name, t in tensors_of(twin).items()}
    return {before[id(t)]: name for name, t in tensors_of(standard(twin)).items()}


def _times(tensor: Tensor, factor: float | None) -> Tensor:
    return tensor if factor is None else tensor * factor
