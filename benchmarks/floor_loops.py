"""Training loops that benchmarks/floor.py measures: written by hand, with torch's DDP and hooks, and thinwire's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from ddp import ddp
from floor_rows import DDP, FP16_HOOK, POWERSGD_HOOK, Row
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import thinwire as tw
from thinwire import registry
from thinwire.comm.ledger import TRAINING
from thinwire.comm.wire_bytes import all_reduce_bytes

SHAPE, CLASSES, LR, MOMENTUM = (3, 32, 32), 10, 0.001, 0.9
START_POWERSGD = 2  # its first compressed step
Batch = tuple[Tensor, Tensor]
loss = nn.functional.cross_entropy


def make_model(spec: str) -> nn.Module:
    """A model for small images, with the same weights on every rank."""
    torch.manual_seed(0)
    model: nn.Module = registry.build("models", spec, SHAPE, CLASSES)
    return model


def make_batch(size: int, device: torch.device, shard: int) -> Batch:
    """Random images and labels; those of a shard are the same on all ranks that read it."""
    generator = torch.Generator().manual_seed(1 + shard)
    inputs = torch.randn(size, *SHAPE, generator=generator)
    return inputs.to(device), torch.randint(0, CLASSES, (size,), generator=generator).to(device)


def sgd(device: torch.device) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A factory of SGD with momentum, fused on a GPU."""
    return lambda parameters: torch.optim.SGD(parameters, LR, MOMENTUM, fused=device.type == "cuda")


class HandWritten:
    """The loop that a user would write: channels_last, bfloat16 and a fused optimizer on a GPU."""

    def __init__(self, model: nn.Module, batch: Batch, wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> None:
        self.device = batch[0].device
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self.model = wrap(model.to(self.device, memory_format=layout))  # type: ignore[call-overload]
        self.inputs, self.targets = batch[0].to(memory_format=layout), batch[1]
        self.optimizer = sgd(self.device)(self.model.parameters())

    def begin(self, steps: int | None) -> None:
        """Nothing to do before an epoch."""

    def step(self) -> None:
        """One step."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            result = loss(self.model(self.inputs), self.targets)
        result.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> None:
        """Nothing to do after an epoch."""

    def sent(self) -> tuple[int, int]:
        """Bytes that this rank has sent so far, and how many of them left its host."""
        return 0, 0


class OfTorch(HandWritten):
    """The same with DDP, and with a hook of torch. Bytes are those of a ring all-reduce of what is sent."""

    def __init__(self, name: str, model: nn.Module, batch: Batch, comm: tw.Comm) -> None:
        self.name, self.ranks, self.steps = name, comm.size, 0
        self.has_hosts = len(set(comm.nodes)) > 1  # torch's rows are measured with one rank on each
        self.size = 4 * sum(p.numel() for p in model.parameters())
        self.state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=START_POWERSGD)
        super().__init__(model, batch, self._wrapped)

    def _wrapped(self, model: nn.Module) -> nn.Module:
        one_bucket = {"bucket_cap_mb": 1000} if self.name == POWERSGD_HOOK else {}  # with two its hook hangs on gloo
        wrapped = ddp(model, **one_bucket)
        if self.name == FP16_HOOK:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        elif self.name == POWERSGD_HOOK:
            wrapped.register_comm_hook(self.state, powerSGD_hook)
        return wrapped

    def step(self) -> None:
        super().step()
        self.steps += 1

    def sent(self) -> tuple[int, int]:
        payload = {
            DDP: self.steps * self.size,
            FP16_HOOK: self.steps * self.size // 2,
            POWERSGD_HOOK: 4 * self.state.total_numel_after_compression,
        }[self.name]
        num_bytes = all_reduce_bytes(payload, self.ranks)
        return num_bytes, num_bytes if self.has_hosts else 0


class OfThinwire:
    """A trainer of `tw.prepare` in a user's loop."""

    def __init__(self, row: Row, model: nn.Module, batch_size: int, device: torch.device, comm: tw.Comm) -> None:
        self.comm = comm
        spec = row.name
        if row.hosts_of_two and len(set(comm.nodes)) == 1:  # without hosts, on loopback
            spec = spec.replace("(", "(ranks_per_node=2, ", 1)
        self.trainer = tw.prepare(
            spec, model=model.to(device), optimizer=sgd(device), loss=loss, comm=comm, epochs=row.epochs,
            autocast=device.type == "cuda",
        )  # fmt: skip
        shard = self.trainer.shard  # where ranks share one, they read as many samples together
        batch = make_batch(batch_size * comm.size // shard.count, device, shard.index)
        self.step: Callable[[], Any] = functools.partial(self.trainer.step, batch)

    def begin(self, steps: int | None) -> None:
        """Begin an epoch."""
        self.trainer.begin_epoch(steps)

    def end(self) -> None:
        """End an epoch."""
        self.trainer.end_epoch()

    def sent(self) -> tuple[int, int]:
        """Bytes that this rank has sent for training so far, and how many of them left its host."""
        rows = [row for row in self.comm.ledger.rows() if row["purpose"] in TRAINING]
        return sum(row["wire_bytes"] for row in rows), sum(row["between_bytes"] for row in rows)


Loop = HandWritten | OfThinwire


def make_loop(row: Row, model_spec: str, batch_size: int, device: torch.device, comm: tw.Comm) -> Loop:
    """The loop of a row."""
    model = make_model(model_spec)
    if row.name in (DDP, FP16_HOOK, POWERSGD_HOOK):
        return OfTorch(row.name, model, make_batch(batch_size, device, comm.rank), comm)
    return OfThinwire(row, model, batch_size, device, comm)
