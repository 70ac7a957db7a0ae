"""Checkpoints: safetensors for tensors, JSON for the rest, nothing pickled, never half written.

Each rank writes its own two files, so ranks need not share a disk. The manifest comes last and holds the hash of
the tensors and one of itself: a checkpoint without a manifest, or with another hash, does not count. On resume the
ranks agree on the newest step that all of them have whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.common.files import write_atomically, write_text
from thinwire.common.tensor_files import write_tensors
from thinwire.errors import RunError
from thinwire.run.states import Tree, pack, unpack

FORMAT = "thinwire-checkpoint-3"
DAMAGE = (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError)


class Foreign(RunError):
    """A checkpoint that is whole, but of another run, or of another version of thinwire."""


class Checkpoints:
    """The checkpoints of one run, as one rank sees them.

    `identity` describes the run (its config); a folder with checkpoints of another run alone is refused.
    """

    def __init__(
        self, folder: Path, comm: Comm, identity: dict[str, Any], keep: int, warn: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.comm = comm
        self.identity = {**identity, "ranks": comm.size}
        self.keep = keep
        self.warn = warn
        self.foreign = ""  # why a whole checkpoint is not of this run

    def save(self, step: int, make_state: Callable[[], Tree]) -> None:
        """Write a checkpoint and keep the last few. Collective."""
        with self.comm.ledger.purpose("checkpoint"):
            self.comm.barrier()  # from here on every rank has every earlier checkpoint
        for old in [s for s in self._steps() if s < step][: 1 - self.keep]:
            self._drop(old)
        tensors: dict[str, Tensor] = {}
        tree = pack(make_state(), tensors)
        _check_finite(tensors, step)
        data, manifest = self._files(step)
        digest = ""

        def write(path: Path) -> None:
            nonlocal digest
            write_tensors(tensors, path)
            digest = _hash(path)

        write_atomically(data, write)
        told = {**self._place(step), "identity": self.identity, "sha256": digest, "tree": tree}
        write_text(manifest, json.dumps({"format": FORMAT, **told, "manifest_sha256": _hash_of(told)}))

    def load_latest(self) -> tuple[int, Tree] | None:
        """The newest checkpoint that every rank has whole, or None. Collective."""
        self.foreign = ""
        found: dict[int, Tree] = {}
        candidates = self._steps()
        while True:
            mine = next((s for s in reversed(candidates) if s in found or self._try(s, found)), -1)
            with self.comm.ledger.purpose("checkpoint"):
                everyones = all_gather_json(self.comm, mine)
            step = min(everyones)
            if step == max(everyones):
                if step < 0:
                    self._refuse_foreign()
                self._set_aside(step)
                return (step, found[step]) if step >= 0 else None
            candidates = [s for s in candidates if s <= step]

    def _refuse_foreign(self) -> None:
        """Where checkpoints are whole but not this run's, a new run must not take their folder. Collective."""
        with self.comm.ledger.purpose("checkpoint"):
            reasons = [reason for reason in all_gather_json(self.comm, self.foreign) if reason]
        if reasons:
            raise RunError(
                f"{reasons[0]}. Nothing was changed; go on with the settings, and the version of thinwire, that it was "
                "made with, or give another --out"
            )

    def _set_aside(self, step: int) -> None:
        """Rename what is newer than the checkpoint in use: it must not count, but it is not ours to delete."""
        for newer in [s for s in self._steps() if s > step]:
            for path in self._files(newer):
                with suppress(FileNotFoundError):
                    path.replace(path.with_name(f"{path.name}.refused"))
        for scrap in self.folder.glob(f"step-*/.rank-{self.comm.rank}.*.new"):  # of a write that was killed
            scrap.unlink()

    def _try(self, step: int, found: dict[int, Tree]) -> bool:
        try:
            found[step] = self._read(step)
        except RunError as error:
            if isinstance(error, Foreign):
                self.foreign = self.foreign or str(error)
            self.warn(f"{error}; trying the one before")
        return step in found

    def _read(self, step: int) -> Tree:
        data, manifest = self._files(step)
        try:
            told = json.loads(manifest.read_text(encoding="utf-8"))
            kind, own_hash = told.pop("format"), told.pop("manifest_sha256", None)
            if kind != FORMAT:
                raise Foreign(f"checkpoint {manifest} has format {kind!r}; this version of thinwire reads {FORMAT!r}")
            if own_hash != _hash_of(told):
                raise RunError(f"checkpoint {manifest} is damaged (its hash is not the one that it tells)")
            if told["identity"] != self.identity:
                difference = _difference(told["identity"], self.identity)
                raise Foreign(f"checkpoint {manifest} is of another run ({difference})")
            if (there := {key: told[key] for key in self._place(step)}) != self._place(step):
                raise RunError(f"checkpoint {manifest} is of another place ({_difference(there, self._place(step))})")
            if told["sha256"] != _hash(data):
                raise RunError(f"checkpoint {data} is damaged (its hash is not the one in its manifest)")
            return unpack(told["tree"], load_file(data))
        except DAMAGE as error:
            raise RunError(f"checkpoint {manifest.parent} is damaged ({type(error).__name__}: {error})") from error

    def _place(self, step: int) -> dict[str, int]:
        """Where a checkpoint belongs: nobody goes on with what was copied from another place."""
        return {"step": step, "rank": self.comm.rank}

    def _steps(self) -> list[int]:
        """Steps that this rank has a manifest for, oldest first."""
        names = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*"))
        steps = [int(match[1]) for match in names if match]
        return sorted(step for step in steps if self._files(step)[1].exists())

    def _files(self, step: int) -> tuple[Path, Path]:
        folder = self.folder / f"step-{step:08d}"
        return folder / f"rank-{self.comm.rank}.safetensors", folder / f"rank-{self.comm.rank}.json"

    def _drop(self, step: int) -> None:
        data, manifest = self._files(step)
        manifest.unlink(missing_ok=True)  # first: without it the rest does not count
        data.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: other ranks of this disk are not done yet
            manifest.parent.rmdir()


def _check_finite(tensors: dict[str, Tensor], step: int) -> None:
    """A checkpoint to go on from must be worth it: the one before still is."""
    for path, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise RunError(
                f"{path.strip('/')} is not finite after step {step}, so no checkpoint is written; "
                "try a lower --lr or --clip-norm 1. The checkpoint before is kept"
            )


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(told: dict[str, Any]) -> str:
    """Of what JSON text says, however it is written."""
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _difference(saved: dict[str, Any], own: dict[str, Any]) -> str:
    keys = [key for key in {**saved, **own} if saved.get(key) != own.get(key)]
    return ", ".join(f"{key}: {saved.get(key)} there, {own.get(key)} here" for key in keys)
