"""Checkpoints: tensors as safetensors, everything else as JSON; nothing is pickled.

Each rank writes its own two files, so ranks need not share a disk. The manifest is written last. It holds a hash of
the tensors and a hash of itself. A checkpoint without a manifest, or with another hash, is ignored. On resume the
ranks agree on the newest step for which all of them have a complete checkpoint.
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
from thinwire.errors import RunError, one_line
from thinwire.run.states import Tree, pack, unpack

FORMAT = "thinwire-checkpoint-4"
READ_ERRORS = (
    OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, RuntimeError,
    SafetensorError,
)  # fmt: skip


class AnotherRunError(RunError):
    """A checkpoint is complete, but of another run or of another version of thinwire."""


class Checkpoints:
    """The checkpoints of one run, as one rank sees them.

    `identity` describes the run (its config). A folder that has only checkpoints of another run is refused. With
    `sweeps`, what a killed run left is removed, so no other run may write to the folder.
    """

    def __init__(
        self, folder: Path, comm: Comm, identity: dict[str, Any], keep: int, warn: Callable[[str], None],
        sweeps: bool = True,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.comm = comm
        self.identity = {**identity, "ranks": comm.size}
        self.keep = keep
        self.warn = warn
        self.sweeps = sweeps
        self.another_run = ""  # the error of a complete checkpoint that is of another run

    def save(self, step: int, make_state: Callable[[], Tree]) -> None:
        """Write a checkpoint, and delete all but the last few. Collective."""
        self.comm.note("saving a checkpoint")
        with self.comm.ledger.purpose("checkpoint"):
            self.comm.barrier()  # from here on every rank has every earlier checkpoint
        for old in [s for s in self._steps() if s < step][: 1 - self.keep]:
            self._delete(old)
        tensors: dict[str, Tensor] = {}
        tree = pack(make_state(), tensors)
        _check_finite(tensors, step)
        data, manifest = self._files(step)
        digest = ""

        def write(path: Path) -> None:
            nonlocal digest
            write_tensors(tensors, path)
            digest = _hash_file(path)

        write_atomically(data, write)
        content = {**self._step_and_rank(step), "identity": self.identity, "sha256": digest, "tree": tree}
        write_text(manifest, json.dumps({"format": FORMAT, **content, "manifest_sha256": _hash_json(content)}))

    def load_latest(self) -> tuple[int, Tree] | None:
        """The newest checkpoint that is complete on every rank, or None. Collective."""
        self.another_run = ""
        found: dict[int, Tree] = {}
        candidates = self._steps()
        while True:
            own_newest = next((s for s in reversed(candidates) if s in found or self._try_read(s, found)), -1)
            with self.comm.ledger.purpose("checkpoint"):
                newest = all_gather_json(self.comm, own_newest)
            step = min(newest)
            if step == max(newest):
                if step < 0:
                    self._refuse_another_run()
                self.set_aside_after(step)
                return (step, found[step]) if step >= 0 else None
            candidates = [s for s in candidates if s <= step]

    def _refuse_another_run(self) -> None:
        """Raise RunError if the folder has only complete checkpoints of another run. Collective."""
        with self.comm.ledger.purpose("checkpoint"):
            reasons = [reason for reason in all_gather_json(self.comm, self.another_run) if reason]
        if reasons:
            raise RunError(
                f"{reasons[0]}. Nothing was changed; use the settings and the version of thinwire that it was made "
                "with, or give another --out"
            )

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps, so that they are ignored from now on."""
        for newer in [s for s in self._steps() if s > step]:
            for path in self._files(newer):
                with suppress(FileNotFoundError):
                    path.replace(path.with_name(f"{path.name}.refused"))
        if self.sweeps:
            self._sweep()

    def _sweep(self) -> None:
        """Remove what is left of this rank's writing and deleting where that was killed; no checkpoint needs it."""
        for folder in self.folder.glob("step-*"):
            data, manifest = folder / f"rank-{self.comm.rank}.safetensors", folder / f"rank-{self.comm.rank}.json"
            with suppress(OSError):  # another rank has removed the folder, or it is not empty
                for incomplete in folder.glob(f".rank-{self.comm.rank}.*.new"):
                    incomplete.unlink()
                if not manifest.exists():
                    data.unlink(missing_ok=True)
                folder.rmdir()

    def _try_read(self, step: int, found: dict[int, Tree]) -> bool:
        try:
            found[step] = self._read(step)
        except RunError as error:
            if isinstance(error, AnotherRunError):
                self.another_run = self.another_run or str(error)
            self.warn(f"{error}; trying the checkpoint before it")
        return step in found

    def _read(self, step: int) -> Tree:
        data, manifest = self._files(step)
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            form, own_hash = content.pop("format"), content.pop("manifest_sha256", None)
            if form != FORMAT:
                raise AnotherRunError(
                    f"checkpoint {manifest} has format {form!r}; this version of thinwire reads {FORMAT!r}"
                )
            if own_hash != _hash_json(content):
                raise RunError(f"checkpoint {manifest} is damaged (its content does not match the hash in it)")
            if content["identity"] != self.identity:
                difference = _difference(content["identity"], self.identity)
                raise AnotherRunError(f"checkpoint {manifest} is of another run ({difference})")
            own_place = self._step_and_rank(step)
            if (place := {key: content[key] for key in own_place}) != own_place:
                raise RunError(f"checkpoint {manifest} is of another step or rank ({_difference(place, own_place)})")
            if content["sha256"] != _hash_file(data):
                raise RunError(f"checkpoint {data} is damaged (its content does not match the hash in its manifest)")
            return unpack(content["tree"], load_file(data))
        except RunError:
            raise
        except READ_ERRORS as error:
            why = one_line(f"{type(error).__name__}: {error}")
            raise RunError(f"checkpoint {manifest.parent} is damaged ({why})") from error

    def _step_and_rank(self, step: int) -> dict[str, int]:
        """Written into a manifest, so that a file that was copied from another step or rank is found."""
        return {"step": step, "rank": self.comm.rank}

    def _steps(self) -> list[int]:
        """Steps that this rank has a manifest for, oldest first."""
        names = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*"))
        steps = [int(match[1]) for match in names if match]
        return sorted(step for step in steps if self._files(step)[1].exists())

    def _files(self, step: int) -> tuple[Path, Path]:
        folder = self.folder / f"step-{step:08d}"
        return folder / f"rank-{self.comm.rank}.safetensors", folder / f"rank-{self.comm.rank}.json"

    def _delete(self, step: int) -> None:
        data, manifest = self._files(step)
        manifest.unlink(missing_ok=True)  # first: without it the checkpoint is ignored
        data.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: other ranks have not deleted theirs yet
            manifest.parent.rmdir()


def _check_finite(tensors: dict[str, Tensor], step: int) -> None:
    """Raise RunError if a tensor is not finite: a run could not continue from it."""
    for path, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise RunError(
                f"{path.strip('/')} is not finite after step {step}, so no checkpoint is written; "
                "try a lower --lr or --clip-norm 1. The last checkpoint is kept"
            )


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(content: dict[str, Any]) -> str:
    """The hash of JSON content; blanks in its text do not matter."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _difference(saved: dict[str, Any], own: dict[str, Any]) -> str:
    keys = [key for key in {**saved, **own} if saved.get(key) != own.get(key)]
    return one_line(", ".join(f"{key}: {saved.get(key)} there, {own.get(key)} here" for key in keys))
