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

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json, coalesced
from thinwire.common.files import write_text
from thinwire.common.tensor_files import save_model, save_tensors
from thinwire.common.tensors import named_tensors, num_bytes
from thinwire.errors import RunError, UsageError
from thinwire.exchange.sharded import ShardedTensors
from thinwire.surgery.meta import with_tensors
from thinwire.surgery.standard import to_standard_modules

Factors = Mapping[str, float]  # what some tensors are multiplied by


@torch.no_grad()
def assembled(model: nn.Module, homes: ShardedTensors, factors: Factors) -> nn.Module:
    """The whole network on every rank. Collective."""
    whole = with_tensors(model, {name: _times(t, factors.get(name)) for name, t in homes.whole()})
    return to_standard_modules(whole)


class StreamedModel(nn.Module):
    """The whole network, of which each rank holds one layer at a time.

    A layer's parameters are fetched from their homes when it is about to run and dropped afterwards. All ranks must
    run it equally often. Buffers, which are small, are there all the time.
    """

    def __init__(self, model: nn.Module, homes: ShardedTensors, factors: Factors) -> None:
        super().__init__()
        self.homes, self.factors, self.renamed = homes, factors, _standard_names(model)
        buffers = [name for name, t in named_tensors(model).items() if not isinstance(t, nn.Parameter)]
        self.model = with_tensors(model, dict(homes.whole(buffers)))
        known = {id(p): name for name, p in self.model.named_parameters()}
        self.names = {
            module: {key: known[id(p)] for key, p in module._parameters.items() if p is not None}
            for module in self.model.modules()
        }
        for module, names in self.names.items():
            self._drop(module)
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

    def _drop(self, module: nn.Module, inputs: Any = None, output: Any = None) -> None:
        for key in self.names[module]:
            there = module._parameters[key]
            assert there is not None
            module._parameters[key] = _Away(there.to("meta"), False)


class _Away(nn.Parameter):
    """A parameter that is not here. On the meta device torch would compute with whatever is in memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("__get__", "numel", "element_size", "dim", "size", "to", "detach", "__repr__"):
            raise RunError(
                "a weight is read by something else than its own layer, so this network cannot be run layer by layer; "
                "ist(whole_gb=…) says how large a network may be that is put together"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@torch.no_grad()
def calibrate(model: nn.Module, recent: Iterable[Tensor], comm: Comm, autocast: bool) -> None:
    """Measure BatchNorm's statistics of a whole network, whose sums have more terms than narrow ones. Collective.

    Each rank runs it on its own inputs; what they find is averaged over ranks. Frozen norms, those in eval mode, keep
    their statistics, and so do all where no rank has inputs.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None and m.training]
    if not norms or comm.size == 1:
        return
    inputs = list(recent)
    about = all_gather_json(comm, [len(inputs), list(inputs[0].shape), str(inputs[0].dtype)] if inputs else [0, [], ""])
    total, most = sum(number for number, _, _ in about), max(about)
    if not total:
        return
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum, norm.num_batches_tracked = None, torch.zeros_like(norm.num_batches_tracked)  # type: ignore[arg-type]
    for x in inputs:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            model(x)
    statistics = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
    if isinstance(model, StreamedModel):  # whose layers are fetched by all ranks together
        model.eval()
        for _ in range(most[0] - len(inputs)):
            model(
                torch.zeros(most[1], dtype=getattr(torch, most[2].removeprefix("torch.")), device=statistics[0].device)
            )
    coalesced(statistics, lambda flat: comm.sum(flat * (len(inputs) / total)))
    for module, training in modes.items():
        module.training = training
    for norm, momentum, tracked in before:
        norm.momentum, norm.num_batches_tracked = momentum, tracked


@torch.no_grad()
def export(folder: Path, model: StreamedModel, max_bytes: float | None = None, *, replace: bool = False) -> None:
    """Write the whole network as safetensors files with an index, none larger than a home or so many bytes. Collective.

    Rank 0 writes, and holds one file's tensors at a time. Names and format are those of any sharded model.
    """
    homes, comm = model.homes, model.homes.comm
    exists = comm.rank == 0 and folder.exists() and not replace
    if int(comm.max(torch.tensor([exists], dtype=torch.uint8))):
        raise UsageError(f"export: {folder} exists already; choose a new folder")
    buffers = {name: t for name, t in named_tensors(model.model).items() if not isinstance(t, nn.Parameter)}
    files = _files(homes, max_bytes or homes.num_bytes / comm.size)
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    index: dict[str, str] = {}
    error: Exception | None = None
    for number, names in enumerate(files, 1):
        tensors = {
            model.renamed[name]: buffers[name] if name in buffers else _times(t, model.factors.get(name))
            for name, t in homes.whole(names, root=0)
        }
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        index |= dict.fromkeys(tensors, file)
        if comm.rank == 0 and error is None:  # the others go on sending: they cannot know
            try:
                save_tensors(tensors, new / file)
            except RunError as failed:
                error = failed
    if comm.rank == 0 and error is None:
        try:
            about = {"metadata": {"total_size": homes.num_bytes}, "weight_map": index}
            write_text(new / "model.safetensors.index.json", json.dumps(about, indent=1))
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except (OSError, RunError) as failed:
            error = failed
    for scrap in (new, old) if comm.rank == 0 else ():
        shutil.rmtree(scrap, ignore_errors=True)
    if int(comm.max(torch.tensor([error is not None], dtype=torch.uint8))):
        raise RunError(f"export: rank 0 could not write {folder}" + (f" ({error})" if error else ""))


def save_whole_model(model: nn.Module, folder: Path, comm: Comm) -> None:
    """Write model.safetensors into a folder or, of a streamed model, the sharded set model/. Collective."""
    if isinstance(model, StreamedModel):
        export(folder / "model", model, replace=True)
    elif comm.rank == 0:
        save_model(model, folder / "model.safetensors")


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


def _files(homes: ShardedTensors, max_bytes: float) -> list[list[str]]:
    files: list[list[str]] = []
    room = 0.0
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
    before = {id(t): name for name, t in named_tensors(twin).items()}
    return {before[id(t)]: name for name, t in named_tensors(to_standard_modules(twin)).items()}


def _times(tensor: Tensor, factor: float | None) -> Tensor:
    return tensor if factor is None else tensor * factor
