"""What each rank keeps beside a framework's own checkpoint: one safetensors file a rank, without pickled objects."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.common.files import write_atomically
from thinwire.common.tensor_files import write_tensors
from thinwire.errors import RunError, UsageError
from thinwire.run.states import pack, unpack


def rank_folder(checkpoint: str | Path) -> Path:
    """The folder of the ranks' files that belong to a checkpoint.

    >>> rank_folder("runs/last.ckpt").name
    'last.ckpt.ranks'
    """
    if "://" in str(checkpoint):
        raise UsageError(
            f"{checkpoint}: ranks keep files beside the checkpoint; give a folder that all of them can read"
        )
    path = Path(checkpoint)
    return path.with_name(f"{path.name}.ranks")


def save_rank(folder: Path, rank: int, ranks: int, state: Any) -> None:
    """Write this rank's state, completely or not at all."""
    tensors: dict[str, Tensor] = {}
    tree = pack(state, tensors)
    metadata = {"ranks": str(ranks), "tree": json.dumps(tree)}
    write_atomically(_file(folder, rank), lambda path: write_tensors(tensors, path, metadata))


def load_rank(folder: Path, rank: int, ranks: int) -> Any:
    """The state that this rank wrote."""
    path = _file(folder, rank)
    if not path.exists():
        raise UsageError(
            f"{path} is missing: each rank needs its own state to go on exactly. Copy the folder with the checkpoint, "
            "or begin anew from the model alone"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            tree, saved_ranks = json.loads(metadata["tree"]), int(metadata["ranks"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise RunError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if saved_ranks != ranks:
        raise UsageError(f"{folder} is of {saved_ranks} ranks, and these are {ranks}; use as many, or begin anew")
    return unpack(tree, tensors)


def remove_rank(folder: Path, rank: int) -> None:
    """Remove this rank's file, and the folder if it was the last one."""
    _file(folder, rank).unlink(missing_ok=True)
    with suppress(OSError):  # others have not removed theirs yet
        folder.rmdir()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"
