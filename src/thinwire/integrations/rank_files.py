"""What each rank keeps beside a framework's own checkpoint: one safetensors file a rank, without pickled objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from thinwire.common.files import write_atomically
from thinwire.common.tensor_files import write_tensors
from thinwire.common.tensors import fingerprint, local_part
from thinwire.errors import RunError, UsageError, one_line
from thinwire.exchange.attach import Attached
from thinwire.run.checkpoint import READ_ERRORS
from thinwire.run.states import pack, unpack
from thinwire.strategies.own_loop import AttachedRounds


@dataclass(frozen=True)
class RankState:
    """What a rank needs to go on exactly, besides the framework's checkpoint, which has rank 0's state alone.

    With rounds these are also its optimizers and its loss scaler: ranks that train separately have different ones. The
    file says to which weights of `model` it belongs, and goes on with no others.
    """

    model: nn.Module
    exchange: Attached | AttachedRounds
    optimizers: Sequence[Optimizer] = ()
    scaler: GradScaler | None = None

    def save(self, folder: Path, rank: int, ranks: int) -> None:
        """Write this rank's file, completely or not at all."""
        state = {
            "weights": self._weights(),
            "exchange": self.exchange.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }
        tensors: dict[str, Tensor] = {}
        metadata = {"ranks": str(ranks), "tree": json.dumps(pack(state, tensors))}
        write_atomically(_file(folder, rank), lambda path: write_tensors(tensors, path, metadata))

    def load(self, folder: Path, rank: int, ranks: int) -> None:
        """Go on from the file that this rank wrote; the framework has loaded the model."""
        state = _read(folder, rank, ranks)
        if state.get("weights") not in (None, self._weights()):  # earlier versions did not keep it
            raise UsageError(
                f"{_file(folder, rank)} belongs to other weights than those that were loaded; give the folder of the "
                "checkpoint that has them, or begin anew from the model alone"
            )
        saved = len(state["optimizers"]), state["scaler"] is not None
        here = len(self.optimizers), self.scaler is not None
        if saved != here:
            raise UsageError(
                f"{folder} is of (optimizers, scaler) = {saved}, and here they are {here}; use the same ones"
            )
        self.exchange.load_state_dict(state["exchange"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _weights(self) -> str:
        """A hash that tells the model's parameters apart from those of another step."""
        fingerprints = [fingerprint(local_part(p.detach())) for p in self.model.parameters()]
        return hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()[:16]


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


def rank_folder_of(checkpoint: Path) -> Path:
    """The same for a checkpoint that is there. A link stands for the checkpoint that it leads to, as last.ckpt may."""
    there = rank_folder(checkpoint.resolve())
    return there if checkpoint.is_symlink() and there.exists() else rank_folder(checkpoint)


def remove_rank(folder: Path, rank: int) -> None:
    """Remove this rank's file, and the folder if it was the last one."""
    _file(folder, rank).unlink(missing_ok=True)
    with suppress(OSError):  # others have not removed theirs yet
        folder.rmdir()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def _read(folder: Path, rank: int, ranks: int) -> Any:
    """The state in this rank's file."""
    path = _file(folder, rank)
    if not path.exists():
        raise UsageError(
            f"{path} is missing: each rank needs its own state to go on exactly. Save on every rank, and copy the "
            "folder with the checkpoint; or begin anew from the model alone"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            tree, saved_ranks = json.loads(metadata["tree"]), int(metadata["ranks"])
            state = unpack(tree, tensors)
    except READ_ERRORS as error:
        raise RunError(f"{path} is damaged ({one_line(f'{type(error).__name__}: {error}')})") from error
    if saved_ranks != ranks:
        raise UsageError(f"{folder} is of {saved_ranks} ranks, and these are {ranks}; use as many, or begin anew")
    return state
