"""The whole network from its shards into files that any reader of sharded models knows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.common.files import write_text
from thinwire.common.packing import groups_within
from thinwire.common.tensor_files import save_model, save_tensors
from thinwire.common.tensors import named_tensors, num_bytes
from thinwire.errors import RunError, UsageError
from thinwire.exchange.streamed import StreamedModel, times_factor

INDEX_FILE = "model.safetensors.index.json"


@torch.no_grad()
def export_model(folder: Path, model: StreamedModel, max_bytes: float | None = None, *, replace: bool = False) -> None:
    """Write the whole network as safetensors files with an index, none larger than a rank's shards or so many bytes.

    Rank 0 writes, and holds one file's tensors at a time. Names and format are those of any sharded model. Collective.
    """
    comm = model.sharded.comm
    exists = comm.rank == 0 and folder.exists() and not replace
    if int(comm.max(torch.tensor([exists], dtype=torch.uint8))):
        raise UsageError(f"export: {folder} exists already; choose a new folder")
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    weight_map: dict[str, str] = {}
    error: Exception | None = None
    for file, tensors in _files(model, max_bytes or model.sharded.num_bytes / comm.size):
        weight_map |= dict.fromkeys(tensors, file)
        if comm.rank == 0 and error is None:  # the others go on sending: they cannot know
            try:
                save_tensors(tensors, new / file)
            except RunError as failed:
                error = failed
    if comm.rank == 0 and error is None:
        try:
            index = {"metadata": {"total_size": model.sharded.num_bytes}, "weight_map": weight_map}
            write_text(new / INDEX_FILE, json.dumps(index, indent=1))
            _replace_folder(folder, new, old)
        except (OSError, RunError) as failed:
            error = failed
    for scrap in (new, old) if comm.rank == 0 else ():
        shutil.rmtree(scrap, ignore_errors=True)
    if int(comm.max(torch.tensor([error is not None], dtype=torch.uint8))):
        raise RunError(f"export: rank 0 could not write {folder}" + (f" ({error})" if error else ""))


def _files(model: StreamedModel, max_bytes: float) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each file's name, and its tensors on rank 0. Collective."""
    buffers = {name: t for name, t in named_tensors(model.model).items() if not isinstance(t, nn.Parameter)}
    sizes = {name: num_bytes(tensor) for name, tensor in model.sharded.slices.tensors.items()}
    files = groups_within(sizes, max_bytes)
    for number, names in enumerate(files, 1):
        tensors = {
            model.standard_names[name]: buffers[name] if name in buffers else times_factor(t, model.factors.get(name))
            for name, t in model.sharded.gather(names, root=0)
        }
        yield f"model-{number:05d}-of-{len(files):05d}.safetensors", tensors


def _replace_folder(folder: Path, new: Path, old: Path) -> None:
    if folder.exists():
        folder.rename(old)
    new.rename(folder)


def save_whole_model(model: nn.Module, folder: Path, comm: Comm) -> None:
    """Write model.safetensors into a folder or, of a streamed model, the sharded set model/. Collective."""
    if isinstance(model, StreamedModel):
        export_model(folder / "model", model, replace=True)
    elif comm.rank == 0:
        save_model(model, folder / "model.safetensors")
