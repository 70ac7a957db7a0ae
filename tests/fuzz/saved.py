"""Checkpoints and states: what is packed comes back, and what was changed is refused."""

from __future__ import annotations

import copy
import json
import random
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.fuzz import mutation
from tests.fuzz.harness import Case
from thinwire.comm.base import Comm
from thinwire.comm.board import Board
from thinwire.comm.ledger import Ledger
from thinwire.comm.threads import ThreadComm
from thinwire.errors import RunError
from thinwire.integrations.rank_files import _read as read_rank_file
from thinwire.run.checkpoint import FORMAT, READ_ERRORS, Checkpoints, _hash_file, _hash_json
from thinwire.run.meters import Meters
from thinwire.run.network import LinkReport
from thinwire.run.position import Position, load_newest_checkpoint, run_state
from thinwire.run.records import RunFolder
from thinwire.run.states import pack, random_state, set_random_state, unpack
from thinwire.run.tracking import rows as tracking_rows  # noqa: F401  (loaded before cases run)

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
SPECS = [
    "data_parallel(reducer=error_feedback(maxnorm(bits=4)))",
    "local_sgd",
    "diloco(every=4, fragments=2)",
    "ist(local_steps=2)",
    "ab(cutoff=0.7, sync_every=3, warmup=1)",
]


def one_rank() -> Comm:
    """The only rank of a world of threads."""
    return ThreadComm(Board(1), range(1), 0, "world", Ledger(), [0])


def state_tree(rng: Random, depth: int = 3) -> Any:
    """What a state may hold."""
    kind = rng.randrange(10 if depth else 6)
    if kind == 0:
        shape = [rng.randrange(4) for _ in range(rng.randrange(3))]
        return torch.zeros(shape, dtype=rng.choice(DTYPES)) + torch.tensor(rng.randrange(2))
    if kind < 3:
        return rng.choice((None, True, 0, -5, 2**40, 0.5, 1e308))
    if kind < 6:
        return rng.choice([one for one in mutation.NASTY_TEXT if "\ud800" not in one])
    items = [state_tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind < 8:
        return rng.choice((list, tuple))(items)
    keys = [rng.choice(("a", "$tensor", "$items", 3, "a/b", ("x", 1), "")) for _ in items]
    return dict(zip(keys, items, strict=True))


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal, and of the same types."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def prepare_states(folder: Path) -> Case:
    """unpack(pack(state)) is the state, also as JSON; a changed state of random generators is taken or refused."""
    before = random_state()
    packed_random: dict[str, Tensor] = {}
    random_tree = pack(before, packed_random)

    def case(rng: Random) -> None:
        if rng.random() < 0.7:
            tensors: dict[str, Tensor] = {}
            tree = state_tree(rng)
            packed = json.loads(json.dumps(pack(tree, tensors)))
            assert same(unpack(packed, tensors), tree), f"{tree} became {unpack(packed, tensors)}"
            return
        tree = mutation.json_value(rng, random_tree)
        values = {name: changed_tensor(rng, one) for name, one in packed_random.items()}
        try:
            state = unpack(tree, values)
        except READ_ERRORS as error:
            raise RunError("the checkpoint is damaged") from error  # as Checkpoints reports it
        try:
            set_random_state(state)
            torch.rand(3)
            random.random()
            np.random.rand(700)
        finally:
            set_random_state(before)

    return case


def changed_tensor(rng: Random, tensor: Tensor) -> Tensor:
    """A tensor with other values, another shape or dtype; mostly as it is."""
    change = rng.randrange(12)
    if change == 0:
        return tensor[: rng.randint(0, len(tensor))] if tensor.dim() else tensor.reshape(1, 1)
    if change == 1:
        return tensor.to(rng.choice(DTYPES))
    if change == 2 and tensor.numel():
        flat = tensor.clone().reshape(-1)
        flat[rng.randrange(len(flat))] = rng.choice((0, 1, 127, 255 if tensor.dtype == torch.uint8 else 1))
        return flat.reshape(tensor.shape)
    return tensor


class Example:
    """A run's folder with a checkpoint, and what it takes to go on from it."""

    def __init__(self, folder: Path, spec: str) -> None:
        self.folder, self.spec = RunFolder(folder), spec
        strategy, meters = self.begin()
        for _ in range(3):
            strategy.step((torch.randn(8, 6), torch.randint(0, 3, (8,))))
        state = run_state(Position(step=3, batch=3), 1.0, strategy, meters)
        self.checkpoints().save(3, lambda: state)
        self.checkpoints().save(2, lambda: state)
        self.place = self.folder.checkpoints / "step-00000003"
        self.files = {path: path.read_bytes() for path in self.place.iterdir()}
        manifest = json.loads((self.place / "rank-0.json").read_text())
        self.content = {key: one for key, one in manifest.items() if key not in ("format", "manifest_sha256")}

    def begin(self) -> tuple[Any, Meters]:
        """A strategy and meters that have done nothing."""
        self.comm = one_rank()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        strategy = tw.prepare(
            self.spec,
            model=model,
            optimizer=lambda p: torch.optim.AdamW(p, 0.01),
            comm=self.comm,
            loss=nn.functional.cross_entropy,
            epochs=3,
        )
        return strategy, Meters(self.comm, torch.device("cpu"), LinkReport())

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder.checkpoints, self.comm, {"task": "x"}, 2, lambda text: None)

    def reset(self) -> None:
        for path in self.folder.path.rglob("*.refused"):
            path.unlink()
        for path in self.place.iterdir():
            path.unlink()
        for path, data in self.files.items():
            path.write_bytes(data)


def prepare_checkpoints(folder: Path) -> Case:
    """A changed checkpoint: an older one is taken instead, or the error names it, or it still fits."""
    examples = [Example(folder / str(i), spec) for i, spec in enumerate(SPECS)]
    for example in examples:
        strategy, meters = example.begin()
        load_newest_checkpoint(example.checkpoints(), strategy, meters, example.folder, example.comm, lambda at: None)

    def case(rng: Random) -> None:
        example = rng.choice(examples)
        example.reset()
        data, manifest = example.place / "rank-0.safetensors", example.place / "rank-0.json"
        change = rng.randrange(6)
        if change == 0:
            manifest.write_bytes(mutation.octets(rng, manifest.read_bytes()))
        elif change == 1:
            data.write_bytes(mutation.octets(rng, data.read_bytes()))
        else:
            content = copy.deepcopy(example.content)
            if change == 2:
                content = mutation.json_value(rng, content)
            elif change == 3:
                data.write_bytes(tensors_changed(rng, data.read_bytes()))
            elif change == 4:
                content["tree"]["strategy"] = mutation.json_value(rng, content["tree"]["strategy"])
            else:
                content["tree"] = mutation.json_value(rng, content["tree"])
            if isinstance(content, dict):
                if rng.random() < 0.95:
                    content["sha256"] = _hash_file(data)
                try:
                    own = _hash_json(content)
                    text = json.dumps({"format": FORMAT, **content, "manifest_sha256": own})
                except RecursionError:
                    text = '{"format":' + "[" * 100_000
                manifest.write_text(text)
        if rng.random() < 0.1:
            read_rank_file(example.place, 0, 1)
            return
        strategy, meters = example.begin()
        position = load_newest_checkpoint(
            example.checkpoints(), strategy, meters, example.folder, example.comm, lambda at: None
        )
        assert position is not None
        assert 0 <= position.step < 2**63

    return case


def tensors_changed(rng: Random, data: bytes) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    header = mutation.json_value(rng, json.loads(data[8 : 8 + length]))
    try:
        text = json.dumps(header).encode()
    except RecursionError:
        text = b'{"a":' + b"[" * 50_000
    size = rng.choice((len(text), len(text), len(text), 2**62, 0, 2**31))
    return struct.pack("<Q", size) + text + data[8 + length :]
