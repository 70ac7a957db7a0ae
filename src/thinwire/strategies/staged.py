"""Stages: a model cut into blocks, each on ranks of its own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm, in_one_go
from thinwire.data import Shard, mix
from thinwire.errors import RunError, UsageError
from thinwire.overlap import Afterwards, Alone, Exchange
from thinwire.progress import say_once
from thinwire.reducers.base import Reducer, restored
from thinwire.strategies.base import Learner, Recipe, Strategy, average_buffers, replicate
from thinwire.surgery.blocks import Unit, balanced, check_ties, resolved, units_of
from thinwire.surgery.costs import flops, seconds, shown
from thinwire.surgery.hollow import filled, hollow, tensors_of

Cut = Literal["flops", "time", "parameters"] | list[str]
EXAMPLE_SAMPLES = 2


class Stage(nn.Module):
    """What one rank trains: a block and, where it has one, the head that judges it."""

    def __init__(self, block: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.block: nn.Module = block
        self.head: nn.Module | None = head


class Staged(Strategy):
    """What strategies have in common whose ranks are stages × replicas.

    Stage k's replicas are neighbouring ranks, so that the gradients which they exchange stay near. Stages of one
    replica read the same batches. The model is cut when the first batch shows what passes between its layers.
    """

    def __init__(
        self, name: str, model: nn.Module, recipe: Recipe, comm: Comm, blocks: int | None, cut: Cut, reducer: Reducer
    ) -> None:
        names = cut if isinstance(cut, list) else []
        self.comm, self.recipe, self.cut, self.reducer = comm, recipe, cut, reducer
        self.units = units_of(model, names)
        self.num_blocks = _num_blocks(name, len(names) + 1 if names else blocks, self.units, comm)
        if names and blocks not in (None, self.num_blocks):
            raise UsageError(f"{name}: {len(names)} cuts make {self.num_blocks} blocks, not blocks={blocks}")
        self.num_replicas = comm.size // self.num_blocks
        self.number, self.replica = divmod(comm.rank, self.num_replicas)
        self.shard = Shard(self.replica, self.num_replicas)
        self.sees_loss = self.is_last
        columns = [range(r, comm.size, self.num_replicas) for r in range(self.num_replicas)]
        stages = [range(s * self.num_replicas, (s + 1) * self.num_replicas) for s in range(self.num_blocks)]
        self.column = comm.split(columns, "stages")  # this replica's stages, first block first
        self.peers = comm.split(stages, "replicas")  # this stage's replicas
        self.model: nn.Module = model  # later: what this rank trains of it
        replicate(model, comm)
        self.begun = False
        self.steps_left = 0  # of this epoch, after the present one

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_blocks - 1

    def begin_epoch(self, num_steps: int | None) -> None:
        self.steps_left = self.steps_left or num_steps or 0  # some are, where a run goes on in mid-epoch

    def end_epoch(self) -> None:
        self.steps_left = 0

    # ---- how it begins

    def begin(self, inputs: Tensor, starts: Sequence[int] | None = None) -> None:
        """Cut the model, now that it is known what goes in; every rank keeps its own block. Collective."""
        device = next(self.model.parameters()).device
        self.example = inputs[:EXAMPLE_SAMPLES].detach().to(device)
        modules = [unit.module for unit in self.units]
        seen = shown(modules, self.example)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.autocast):
            on_the_wire = shown(modules, self.example)
        self.starts = list(starts) if starts is not None else self._starts(seen)
        ends = [*self.starts[1:], len(self.units)]
        blocks = [nn.Sequential(*modules[a:b]) for a, b in zip(self.starts, ends, strict=True)]
        check_ties(blocks, self.model)
        outputs = [seen[end] for end in ends]
        self.edges = [on_the_wire[i] for i in (0, *ends)]  # examples of what goes into each block, and of the output
        heads = self.heads(outputs, seen, ends)
        with self.comm.ledger.purpose("start"):
            in_one_go(
                [t for h in heads if h is not None for t in tensors_of(h.to(device)).values()], self.comm.broadcast
            )
        parts = list(zip(range(self.num_blocks), blocks, heads, [seen[a] for a in self.starts], outputs, strict=True))
        self.flops_per_sample = sum(self.flops_of(*part) for part in parts) / len(self.example)
        self.backprop_flops_per_sample = sum(Staged.flops_of(self, *part) for part in parts) / len(self.example)
        names = {id(t): name for name, t in tensors_of(self.model).items()}
        stages = [Stage(block, head) for block, head in zip(blocks, heads, strict=True)]
        self.names = [{n: names.get(id(t), "") for n, t in tensors_of(stage).items()} for stage in stages]
        mine = copy.deepcopy(stages[self.number])
        self.skeleton, self.stages = self.model, stages
        self.rest = {
            n: t for n, t in hollow(self.model).items() if n not in {m for s in self.names for m in s.values()}
        }
        for stage in stages:
            hollow(stage)
        self.model = self.stage = mine
        self.learner = Learner(mine, self.recipe)
        self.exchange: Exchange = (
            Afterwards(mine, self.reducer, self.peers, 25.0, False) if self.num_replicas > 1 else Alone(mine)
        )
        self.begun = True

    def heads(self, outputs: Sequence[Tensor], seen: Sequence[Tensor], ends: Sequence[int]) -> list[nn.Module | None]:
        """A head for each block, or none."""
        return [None] * self.num_blocks

    def _starts(self, seen: Sequence[Tensor]) -> list[int]:
        if isinstance(self.cut, list):
            begins = resolved(self.cut, [unit.name for unit in self.units[1:]])
            return [0, *(i for i, unit in enumerate(self.units) if unit.name in begins)]
        if self.cut == "parameters":
            costs = [float(sum(p.numel() for p in unit.module.parameters())) for unit in self.units]
        else:
            measure = flops if self.cut == "flops" else seconds
            passing = zip(self.units, seen[:-1], strict=True)
            costs = [measure(unit.module, x, input_gradient=i > 0) for i, (unit, x) in enumerate(passing)]
        starts = torch.tensor(balanced(costs, self.num_blocks))
        with self.comm.ledger.purpose("start"):
            return [int(i) for i in self.comm.broadcast(starts)]

    def flops_of(self, stage: int, block: nn.Module, head: nn.Module | None, z_in: Tensor, z: Tensor) -> float:
        """Operations of a stage in training, for the example; here those of backpropagation."""
        return flops(block, z_in, input_gradient=stage > 0)

    # ---- the whole model

    def status(self) -> dict[str, Any]:
        """Where blocks begin, and what a sample costs in training."""
        if not self.begun:
            return {}
        return {
            "blocks": [self.units[start].name for start in self.starts],
            "flops_per_sample": self.flops_per_sample,
            "backprop_flops_per_sample": self.backprop_flops_per_sample,
        }

    def consolidate(self, factored: bool = False) -> nn.Module:
        if not self.begun:
            return copy.deepcopy(self.model)
        tensors = {
            names[n]: t for names, part in zip(self.names, self.gathered(), strict=True) for n, t in part.items()
        }
        return filled(self.skeleton, self.rest | tensors)

    def gathered(self, heads: bool = False) -> list[dict[str, Tensor]]:
        """Every stage's tensors on every rank, those of heads too if wanted. Collective."""
        mine = copy.deepcopy(self.model)
        average_buffers(mine, self.peers)
        found = []
        with self.comm.ledger.purpose("sync", instead_of="train"):
            for number, stage in enumerate(self.stages):
                live = tensors_of(mine) if number == self.number else tensors_of(stage)
                device = self.example.device
                wanted = {n: t for n, t in live.items() if heads or n.startswith("block.")}
                tensors = {
                    n: torch.empty_like(t, device=device) if t.is_meta else t.detach() for n, t in wanted.items()
                }
                root = number * self.num_replicas
                in_one_go(list(tensors.values()), lambda t, root=root: self.comm.broadcast(t, root))  # type: ignore[misc]
                found.append(tensors)
        return found

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        if not self.begun:
            return {"model": self.model.state_dict()}
        return {
            "example": torch.zeros_like(self.example), "starts": self.starts,
            "learner": self.learner.state_dict(), "reducer": self.exchange.states, "steps_left": self.steps_left,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "starts" not in state:
            if self.begun:
                raise RunError("the saved state is of before the first step, but this trainer has begun; use a new one")
            self.model.load_state_dict(state["model"])
            return
        if len(state["starts"]) != self.num_blocks or (self.begun and state["starts"] != self.starts):
            raise RunError(f"the saved state has blocks that begin at units {state['starts']}; use the same cut")
        if not self.begun:
            self.begin(state["example"], state["starts"])
        self.steps_left = state["steps_left"]
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = restored(self.exchange.states, state["reducer"])


def _num_blocks(name: str, asked: int | None, units: Sequence[Unit], comm: Comm) -> int:
    """As many blocks as asked for; else as many as there are ranks, or fewer where the model has no more layers."""
    possible = [k for k in range(1, comm.size + 1) if comm.size % k == 0 and k <= len(units)]
    if asked is None:
        if possible[-1] < comm.size and comm.rank == 0:
            say_once(
                f"{name}: {possible[-1]} blocks on {comm.size // possible[-1]} ranks each: {comm.size} ranks, and a "
                f"model that can be cut into {len(units)}"
            )
        return possible[-1]
    if asked > len(units):
        raise UsageError(
            f"{name}: {asked} blocks, but the model can be cut into {len(units)}, which begin at "
            f"{', '.join(unit.name for unit in units)}; use fewer blocks or a deeper model"
        )
    if comm.size % asked:
        tries = " or ".join(f"blocks={k}" for k in possible)
        raise UsageError(
            f"{name}: {comm.size} ranks cannot share {asked} blocks equally; try {tries}, or {asked * 2} ranks"
        )
    return asked


@contextmanager
def seeded(device: torch.device, *numbers: int) -> Iterator[None]:
    """Random numbers that depend on these numbers alone; afterwards they go on as before.

    Simulated ranks share one generator, so they take turns: nothing in the block may wait for another rank.
    """
    with _GENERATOR, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(mix(*numbers))
        yield


_GENERATOR = threading.RLock()
