"""What a strategy sends in a run, in which order: its own code, recorded on ranks that do not exist."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import registry
from thinwire.comm.ledger import Ledger
from thinwire.comm.recording import RecordingComm, record
from thinwire.comm.trace import Trace
from thinwire.common.messages import quiet
from thinwire.common.no_values import NoValues
from thinwire.common.tensors import named_tensors, num_bytes
from thinwire.data import Batch, Shard, to_device
from thinwire.errors import UsageError
from thinwire.strategies.base import Strategy
from thinwire.strategies.recipe import Recipe
from thinwire.surgery.meta import placeholders, with_tensors


@dataclass(frozen=True)
class Training:
    """A training run: a model, how it is trained, and the batches of an epoch of each shard."""

    model: nn.Module
    recipe: Recipe
    batches: Callable[[Shard], Sequence[Batch]]
    epochs: int
    only_alike: bool = False  # whether recording ends after an epoch if the strategy's steps are not alike


@dataclass(frozen=True)
class RecordedRun:
    """The recorded ranks of a run: their traces and ledgers; `stands_for` has the recorded rank for each rank."""

    spec: str
    traces: dict[int, Trace]
    ledgers: dict[int, Ledger]
    stands_for: list[int]
    nodes: list[int]
    steps_per_epoch: int
    steps_are_alike: bool  # whether the strategy says so
    state_bytes: dict[int, int]  # that each rank keeps: weights, moments, residuals, snapshots; and gradients


def record_run(spec: str, training: Training, nodes: Sequence[int], all_ranks: bool = False) -> RecordedRun:
    """Record a whole run without computing: on the meta device if the strategy needs no values, else with zeros.

    Of ranks that send alike one is recorded, unless `all_ranks` is set. Raises UsageError if the strategy cannot train
    this model on so many ranks.
    """
    try:
        return _record_on(True, spec, training, nodes, all_ranks)
    except (UsageError, RuntimeError):
        if any(p.is_meta for p in training.model.parameters()):
            raise
    return _record_on(False, spec, training, nodes, all_ranks)


def _record_on(meta: bool, spec: str, training: Training, nodes: Sequence[int], all_ranks: bool) -> RecordedRun:
    chosen = list(range(len(nodes))) if all_ranks else _representatives(spec, training, nodes, meta)
    return _record(spec, training, nodes, chosen, meta)


def _representatives(spec: str, training: Training, nodes: Sequence[int], on_meta: bool) -> list[int]:
    """For each rank, the one that is recorded for it."""

    def make(comm: RecordingComm) -> list[int]:
        return Rehearsal(spec, training, comm, on_meta).strategy.representatives()

    found: list[int] = record(make, ranks=len(nodes), nodes=nodes, of=[0])[0][2]
    return found


def _record(spec: str, training: Training, nodes: Sequence[int], stands_for: list[int], on_meta: bool) -> RecordedRun:
    recorded = record(
        lambda comm: Rehearsal(spec, training, comm, on_meta).run(),
        ranks=len(nodes), nodes=nodes, of=sorted(set(stands_for)),
    )  # fmt: skip
    results = {rank: result for rank, (_, _, result) in recorded.items()}
    return RecordedRun(
        spec,
        {rank: trace for rank, (trace, _, _) in recorded.items()},
        {rank: ledger for rank, (_, ledger, _) in recorded.items()},
        stands_for,
        list(nodes),
        next(iter(results.values()))[0],
        all(alike for _, alike, _ in results.values()),
        {rank: state_bytes for rank, (_, _, state_bytes) in results.items()},
    )


class Rehearsal:
    """A run of one recorded rank. What is marked in its trace: the end of each step ("step") and epoch ("epoch")."""

    def __init__(self, spec: str, training: Training, comm: RecordingComm, on_meta: bool) -> None:
        self.training, self.comm, self.on_meta = training, comm, on_meta
        recipe = replace(training.recipe, rehearses=True, compile=False, epochs=training.epochs)
        with self._rehearsing():
            model = _on_meta(training.model) if on_meta else copy.deepcopy(training.model)
            self.strategy: Strategy = registry.build("strategies", spec, model, recipe, comm)

    def run(self) -> tuple[int, bool, int]:
        """Train all epochs; returns the steps of an epoch, if they are alike, and the bytes that the strategy keeps."""
        num_steps = 0
        with self._rehearsing():
            for _ in range(self.training.epochs):
                num_steps = self._train_epoch()
                if self.training.only_alike and not self.strategy.steps_are_alike:
                    break
            model: nn.Module = self.strategy.model  # type: ignore[attr-defined]
            gradients = sum(num_bytes(p) for p in model.parameters() if p.requires_grad)
            return num_steps, self.strategy.steps_are_alike, kept_bytes(self.strategy, self.on_meta) + gradients

    def _train_epoch(self) -> int:
        num_steps = len(self.training.batches(self.strategy.shard))
        self.strategy.begin_epoch(num_steps)
        for batch in self.training.batches(self.strategy.shard):
            self.strategy.step(self._inputs_on_meta(batch) if self.on_meta else batch)
            self.comm.trace.add("mark", op="step")
        self.strategy.end_epoch()
        self.comm.trace.add("mark", op="epoch")
        return num_steps

    def _inputs_on_meta(self, batch: Batch) -> Batch:
        """Targets stay as they are: some strategies compare them between ranks."""
        return self.training.recipe.batch_loss.map_inputs(batch, lambda inputs: to_device(inputs, torch.device("meta")))

    def _rehearsing(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(quiet())
        if self.on_meta:
            stack.enter_context(NoValues())
        return stack


def _on_meta(model: nn.Module) -> nn.Module:
    return with_tensors(model, {name: t.detach().to("meta") for name, t in named_tensors(model).items()}).to("meta")


def kept_bytes(strategy: Strategy, on_meta: bool) -> int:
    """The bytes of all tensors that a strategy refers to, each memory once.

    Tensors on the meta device have no memory, but if the whole run is there (`on_meta`), most stand for those that do.
    """
    found: dict[int, Tensor] = {}
    _collect(strategy, found, set())
    counted = [t.untyped_storage() for t in found.values() if on_meta or not t.is_meta]
    storages = {storage._cdata: storage.nbytes() for storage in counted}
    taken = placeholders()
    return sum(count for storage, count in storages.items() if storage not in taken)


def _collect(value: Any, found: dict[int, Tensor], seen: set[int]) -> None:
    """All tensors in an object of ours or torch's, and in what it refers to."""
    if id(value) in seen or isinstance(value, str | int | float | bytes | type | None.__class__):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[id(value)] = value
        return
    if isinstance(value, RecordingComm):
        return
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [*value.values(), *(key for key in value if isinstance(key, Tensor))]
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        parts = list(value)
    elif type(value).__module__.split(".")[0] in ("thinwire", "torch") or isinstance(value, nn.Module):
        parts = [getattr(value, "__dict__", {})]
    for part in parts:
        _collect(part, found, seen)
