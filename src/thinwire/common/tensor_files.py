"""Models and tensors as safetensors files, which can be read without thinwire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from thinwire.common.dtypes import as_reals
from thinwire.common.files import write_atomically


def save_model(model: nn.Module, path: Path) -> None:
    """Save a model's parameters and buffers in one safetensors file."""
    save_tensors(model.state_dict(), path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Save tensors in one safetensors file. It has no complex128: such a tensor is saved as pairs of float64."""
    saved = {name: as_reals(t) if t.dtype == torch.complex128 else t for name, t in tensors.items()}
    saved = {name: t.detach().cpu().contiguous().clone() for name, t in saved.items()}
    write_atomically(path, lambda temporary: write_tensors(saved, temporary, {"format": "pt"}))


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError if the disk is full, as other writes do."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
