"""What other ranks send: codes, tensors of reductions, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from tests.fuzz import mutation
from tests.fuzz.harness import Case
from tests.fuzz.saved import one_rank
from thinwire import registry
from thinwire.codecs import features
from thinwire.codecs.base import Codec
from thinwire.codecs.multiscale import multiscale
from thinwire.codecs.words import words
from thinwire.comm.base import Comm, Op
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.dry import DryComm
from thinwire.comm.work import FinishedWork, Work

REDUCERS = [
    "mean",
    "fp16",
    "bf16",
    "maxnorm(bits=8)",
    "maxnorm(bits=4)",
    "maxnorm(bits=2)",
    "error_feedback(maxnorm(bits=4))",
    "maxnorm_multiscale",
    "global_randk(ratio=0.25)",
    "topk(ratio=0.25)",
    "error_feedback(topk(ratio=0.25))",
    "terngrad",
    "sign",
    "error_feedback(sign)",
    "powersgd(rank=1)",
    "partition(maxnorm(bits=4), vectors=bf16)",
]


def random_bytes(rng: Random, *shape: int) -> Tensor:
    """Bytes that another rank may send, of a shape that this one expects."""
    count = math.prod(shape)
    data = rng.randbytes(count) if rng.random() < 0.6 else bytes([rng.choice((0, 127, 128, 255))]) * count
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[:count].reshape(shape)


def prepare(folder: Path) -> Case:
    """Codes of the right length become a vector of the right shape; of another length, an error at most."""

    def case(rng: Random) -> None:
        block, rows = 8 * rng.choice((1, 2, 32)), rng.choice((1, 2, 3))
        width = block * rng.choice((1, 2, 5))
        if rng.random() < 0.4:
            unpack_features(rng)
            return
        bits = rng.choice((2, 4, 8))
        codec: Codec = words(bits, block) if rng.random() < 0.6 else multiscale(bits, rng.choice((2, 3, 4)), block)
        length = codec.encode(torch.zeros(width * rows), rows, width, None, None).shape[1]
        right = rng.random() < 0.8
        data = random_bytes(rng, rows, length if right else rng.choice((0, 1, length - 1, length + 1, 3 * length)))
        count = rng.choice((width * rows, width * rows - 1, 1))
        try:
            vector, mean = codec.decode(data, width, count), codec.decode_mean(data, width)
        except (RuntimeError, ValueError):
            assert not right, "codes of the right length were refused"
            return
        assert (vector.shape, vector.dtype) == ((count,), torch.float32) or not right
        assert (mean.shape, mean.dtype) == ((width,), torch.float32) or not right

    return case


def unpack_features(rng: Random) -> None:
    """Bytes as activations."""
    shape = [rng.randrange(1, 5) for _ in range(rng.randrange(3))]
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool))
    wire = rng.choice(("exact", "bf16", "int8"))
    length = features.packed_bytes(shape, dtype, wire)
    data = random_bytes(rng, length)
    z = features.unpack(data, shape, dtype, wire)
    assert (list(z.shape), z.dtype) == (shape, dtype)
    if dtype != torch.bool:
        assert features.pack(torch.zeros(shape, dtype=dtype), wire).numel() == length


class HostileComm(DryComm):
    """A rank whose peers give anything of the right shape and dtype."""

    rng = Random(0)

    def __init__(self, like: Comm) -> None:
        super().__init__(like)
        self.size, self.nodes = 3, (0, 0, 0)

    def _any(self, like: Tensor) -> Tensor:
        if self.rng.random() < 0.3:
            return like.detach().clone()
        size = like.numel() * like.element_size()
        return random_bytes(self.rng, size).clone().view(like.dtype).reshape(like.shape) if size else like.clone()

    def _start_reduce(self, tensor: Tensor, op: Op, device: torch.device, overwrite: bool = False) -> Work:
        return FinishedWork(self._any(tensor))

    def _all_gather(self, tensor: Tensor, device: torch.device) -> list[Tensor]:
        return [tensor.detach().clone(), *(self._any(tensor) for _ in range(self.size - 1))]

    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        return [self._any(part) for part in like]

    def _broadcast(self, tensor: Tensor, root: int, device: torch.device) -> Tensor:
        return self._any(tensor)


def prepare_reducers(folder: Path) -> Case:
    """A reduction with peers that give anything ends in tensors of the right shapes, or in an error for users."""
    shapes = {"weight": (9, 7), "bias": (7,), "scale": (1,)}

    def case(rng: Random) -> None:
        reducer = registry.build("reducers", rng.choice(REDUCERS))
        comm = HostileComm(one_rank())
        comm.rng = rng
        torch.manual_seed(rng.randrange(1000))
        tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
        state = reducer.init(tensors)
        for _ in range(3):
            found, _, state = reducer.reduce({name: one.clone() for name, one in tensors.items()}, state, comm)
            assert {name: tuple(one.shape) for name, one in found.items()} == shapes

    return case


class Messages(DryComm):
    """A rank that hears what it is told to."""

    heard = b""
    length = 0

    def _start_reduce(self, tensor: Tensor, op: Op, device: torch.device, overwrite: bool = False) -> Work:
        return FinishedWork(torch.full_like(tensor, self.length))

    def _all_gather(self, tensor: Tensor, device: torch.device) -> list[Tensor]:
        heard = self.heard[: tensor.numel()].ljust(tensor.numel())
        return [tensor.clone(), torch.frombuffer(bytearray(heard), dtype=torch.uint8)]


def prepare_messages(folder: Path) -> Case:
    """JSON that another rank sends is a value, or an error that names the rank."""

    def case(rng: Random) -> None:
        comm = Messages(one_rank())
        comm.size, comm.nodes = 2, (0, 0)
        value = mutation.value(rng)
        try:
            text = json.dumps(value).encode("utf-8", "surrogatepass")
        except RecursionError:
            text = b"[" * 100_000
        comm.heard = mutation.octets(rng, text) if rng.random() < 0.5 else text
        need = -(-max(1, len(comm.heard)) // 1024) * 1024
        comm.length = need if rng.random() < 0.8 else rng.choice((0, -5, 2**40, 2**62, 1024))
        assert len(all_gather_json(comm, {"own": 1})) == 2

    return case
