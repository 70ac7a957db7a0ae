"""Stages: a model cut into blocks, each on ranks of its own."""

from __future__ import annotations

import copy
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.messages import say
from thinwire.common.tensors import named_tensors
from thinwire.data import Shard, derive_seed
from thinwire.errors import RunError, UsageError
from thinwire.exchange.gradients import AfterBackward, GradientExchange, NoExchange
from thinwire.reducers.base import Reducer
from thinwire.reducers.states import load_states
from thinwire.strategies.base import Series, Strategy
from thinwire.strategies.learner import Learner, Recipe
from thinwire.strategies.replicas import average_buffers, replicate
from thinwire.surgery.blocks import balanced_starts, check_ties, resolve_layer_names
from thinwire.surgery.costs import activations, flops, seconds
from thinwire.surgery.meta import to_meta, with_tensors
from thinwire.surgery.segments import Segment, segments_of

Cut = Literal["flops", "time", "parameters"] | list[str]
EXAMPLE_SAMPLES = 2
BUCKET_MB = 25.0
UNEQUAL = 4.0  # times what the others have on average: a block that makes them wait


class Stage(nn.Module):
    """What one rank trains: a block and, where it has one, the head that judges it."""

    def __init__(self, block: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.block: nn.Module = block
        self.head: nn.Module | None = head


class Staged(Strategy, abstract=True):
    """What strategies have in common whose ranks are stages × replicas.

    Stage k's replicas are neighbouring ranks, so that the gradients which they exchange stay near. Stages of one
    replica read the same batches. The model is cut when the first batch shows what passes between its layers.
    """

    series: ClassVar = {
        "operations": Series(
            "Operations a sample",
            "column",
            "What training on a sample costs, heads included, and how much that is of backpropagation's; counted for "
            "strategies that cut the model into blocks.",
            cell="backprop",
        )
    }

    def __init__(
        self, name: str, model: nn.Module, recipe: Recipe, comm: Comm, blocks: int | None, cut: Cut, reducer: Reducer
    ) -> None:
        names = cut if isinstance(cut, list) else []
        if len(set(names)) < len(names) or cut == []:
            raise UsageError(
                f"{name}: cut={cut}; name each layer that a block shall begin with once, but not the first"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise UsageError("the model has no parameter to train; set requires_grad on at least one")
        self.name, self.comm, self.recipe, self.cut, self.reducer = name, comm, recipe, cut, reducer
        self.device = next(model.parameters()).device
        self.segments = segments_of(model, names)
        self.num_blocks = _num_blocks(name, names, blocks, self.segments, comm)
        if names and blocks not in (None, self.num_blocks):
            raise UsageError(f"{name}: {len(names)} cut(s) make {self.num_blocks} blocks; leave out blocks={blocks}")
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
        self.example = inputs[:EXAMPLE_SAMPLES].detach().clone().to(self.device)
        modules = [segment.module for segment in self.segments]
        seen = activations(modules, self.example)
        self.starts = list(starts) if starts is not None else self._starts(seen)
        ends = [*self.starts[1:], len(self.segments)]
        blocks = [nn.Sequential(*modules[a:b]) for a, b in zip(self.starts, ends, strict=True)]
        self._check(blocks)
        heads = self.heads(seen, ends)
        with self.comm.ledger.purpose("start"):
            weights = [t for head in heads if head is not None for t in named_tensors(head.to(self.device)).values()]
            coalesced(weights, self.comm.broadcast)
        self._weigh(blocks[self.number], heads[self.number], seen[self.starts[self.number]], seen[ends[self.number]])
        self._take_apart([Stage(block, head) for block, head in zip(blocks, heads, strict=True)])
        self.begun = True

    def _check(self, blocks: Sequence[nn.Module]) -> None:
        check_ties(blocks, self.model)
        for number, block in enumerate(blocks, 1):
            if not any(p.requires_grad for p in block.parameters()):
                first = self.segments[self.starts[number - 1]].name
                raise UsageError(
                    f"{self.name}: block {number}, from layer {first} on, has nothing to train; cut elsewhere, use "
                    "fewer blocks, or set requires_grad on a parameter of it"
                )

    def _weigh(self, block: nn.Module, head: nn.Module | None, z_in: Tensor, z: Tensor) -> None:
        """Add up what all stages cost, this one's counted here, and say if one makes the others wait. Collective."""
        own = self.flops_of(block, head, z_in, z), Staged.flops_of(self, block, head, z_in, z)
        with self.comm.ledger.purpose("start"):
            by_stage = torch.stack(self.column.all_gather(torch.tensor(own, dtype=torch.float64))) / len(self.example)
        self.flops_per_sample, self.backprop_flops_per_sample = by_stage.sum(0).tolist()
        self.shares = (by_stage[:, 0] / max(1.0, self.flops_per_sample)).tolist()
        dearest, others = max(self.shares), max(1, self.num_blocks - 1)
        unequal = self.num_blocks > 1 and dearest > UNEQUAL * (1 - dearest) / others
        if unequal and self.cut != "time":
            number = self.shares.index(dearest)
            first = self.segments[self.starts[number]].name
            say(
                f"{self.name}: block {number + 1} of {self.num_blocks}, from layer {first} on, has "
                f"{100 * dearest:.0f} % of the operations, its head's included, and the other ranks will wait for it; "
                "try fewer blocks, another cut or another head",
                self.comm.rank,
                once=True,
            )

    def _take_apart(self, stages: list[Stage]) -> None:
        """Keep this rank's stage, and of the others the shapes alone."""
        names = {id(t): name for name, t in named_tensors(self.model).items()}
        self.names = [{n: names.get(id(t), "") for n, t in named_tensors(stage).items()} for stage in stages]
        self.stage = copy.deepcopy(stages[self.number])
        self.skeleton, self.stages = self.model, stages
        in_blocks = {name for stage in self.names for name in stage.values()}
        self.rest = {name: t for name, t in to_meta(self.model).items() if name not in in_blocks}
        for stage in stages:
            to_meta(stage)
        self.model = self.stage
        self.learner = Learner(self.stage, self.recipe)
        alone = self.num_replicas == 1
        self.exchange: GradientExchange = (
            NoExchange(self.stage) if alone else AfterBackward(self.stage, self.reducer, self.peers, BUCKET_MB, False)
        )

    def heads(self, seen: Sequence[Tensor], ends: Sequence[int]) -> list[nn.Module | None]:
        """A head for each block, or none; `seen` has an example input of each segment, `ends` where blocks end."""
        return [None] * self.num_blocks

    def _starts(self, seen: Sequence[Tensor]) -> list[int]:
        if isinstance(self.cut, list):
            begins = resolve_layer_names(self.cut, [segment.name for segment in self.segments[1:]])
            return [0, *(i for i, segment in enumerate(self.segments) if segment.name in begins)]
        starts = balanced_starts(self._costs(seen), self.num_blocks) if self.comm.rank == 0 else [0] * self.num_blocks
        with self.comm.ledger.purpose("start"):
            return [int(i) for i in self.comm.broadcast(torch.tensor(starts))]

    def _costs(self, seen: Sequence[Tensor]) -> list[float]:
        """What each segment costs, by the measure that the blocks shall be equal in."""
        if self.cut == "parameters":
            return [float(sum(p.numel() for p in segment.module.parameters())) for segment in self.segments]
        measure = flops if self.cut == "flops" else seconds
        passing = zip(self.segments, seen[:-1], strict=True)
        return [measure(segment.module, x, input_gradient=i > 0) for i, (segment, x) in enumerate(passing)]

    def flops_of(self, block: nn.Module, head: nn.Module | None, z_in: Tensor, z: Tensor) -> int:
        """Operations of this rank's stage in training, for the example; here those of backpropagation."""
        return flops(block, z_in, input_gradient=not self.is_first)

    def check_batch(self, its_print: int, own_print: int) -> None:
        """Stop where the stage before this one reads other batches: activations would meet other samples' targets."""
        if its_print != own_print:
            raise UsageError(
                f"{self.name}: stage {self.number + 1} of {self.num_blocks} was given other targets than stage "
                f"{self.number} in step {self.learner.num_steps + 1}; all stages of a replica must read the same "
                "batches in the same order. Use tw.loader(data, trainer.shard, batch_size), or "
                "DistributedSampler(data, num_replicas=trainer.shard.count, rank=trainer.shard.index)"
            )

    # ---- the whole model

    def status(self) -> dict[str, Any]:
        """Where blocks begin, how much of the operations each has, and what a sample costs in training."""
        if not self.begun:
            return {}
        return {
            "blocks": [self.segments[start].name for start in self.starts],
            "operation_shares": [round(share, 3) for share in self.shares],
            "operations": [self.flops_per_sample, self.backprop_flops_per_sample],
        }

    def consolidate(self) -> nn.Module:
        if not self.begun:
            return copy.deepcopy(self.model)
        tensors = {
            names[n]: t for names, part in zip(self.names, self.gathered(), strict=True) for n, t in part.items()
        }
        return with_tensors(self.skeleton, self.rest | tensors)

    def gathered(self, heads: bool = False) -> list[dict[str, Tensor]]:
        """Every stage's tensors on every rank, those of heads too if wanted. Collective."""
        mine = copy.deepcopy(self.model)
        average_buffers(mine, self.peers)
        found = []
        with self.comm.ledger.purpose("sync", instead_of="train"):
            for number, stage in enumerate(self.stages):
                live = named_tensors(mine) if number == self.number else named_tensors(stage)
                wanted = {n: t for n, t in live.items() if heads or n.startswith("block.")}
                tensors = {
                    n: torch.empty_like(t, device=self.device) if t.is_meta else t.detach() for n, t in wanted.items()
                }
                root = number * self.num_replicas
                coalesced(list(tensors.values()), lambda t, root=root: self.comm.broadcast(t, root))  # type: ignore[misc]
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
            raise RunError(f"the saved state has blocks that begin at segments {state['starts']}; use the same cut")
        if not self.begun:
            self.begin(state["example"], state["starts"])
        self.steps_left = state["steps_left"]
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = load_states(self.exchange.states, state["reducer"])


def _num_blocks(name: str, cut: Sequence[str], blocks: int | None, segments: Sequence[Segment], comm: Comm) -> int:
    """As many blocks as asked for; else as many as there are ranks, or fewer where the model has no more layers."""
    possible = [k for k in range(1, comm.size + 1) if comm.size % k == 0 and k <= len(segments)]
    asked = len(cut) + 1 if cut else blocks
    if asked is None:
        if possible[-1] < comm.size:
            say(
                f"{name}: {possible[-1]} blocks on {comm.size // possible[-1]} ranks each: {comm.size} ranks, and a "
                f"model that can be cut into {len(segments)}",
                comm.rank,
                once=True,
            )
        return possible[-1]
    if asked > len(segments):
        raise UsageError(
            f"{name}: {asked} blocks, but the model can be cut into {len(segments)}, which begin at "
            f"{', '.join(segment.name for segment in segments)}; use fewer blocks or a deeper model"
        )
    if comm.size % asked:
        fewer = (
            f"{' or '.join(str(k - 1) for k in possible)} cuts" if cut else f"blocks={' or '.join(map(str, possible))}"
        )
        ranks, enough = f"{comm.size} rank{'s' if comm.size > 1 else ''}", -(-comm.size // asked) * asked
        raise UsageError(f"{name}: {ranks} cannot share {asked} blocks equally; try {fewer}, or {enough} ranks")
    return asked


def fingerprint(targets: Tensor) -> int:
    """A number that tells targets apart: a checksum of their bytes, and how many there are.

    >>> fingerprint(torch.tensor([1, 2])) == fingerprint(torch.tensor([1, 2])) != fingerprint(torch.tensor([2, 1]))
    True
    """
    data = targets.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return (data.numel() % 2**30 << 32) + zlib.crc32(data.numpy().tobytes())


@contextmanager
def seeded(device: torch.device, *numbers: int) -> Iterator[None]:
    """Random numbers that depend on these numbers alone; afterwards they go on as before.

    Simulated ranks share one generator, so they take turns: nothing in the block may wait for another rank.
    """
    with _GENERATOR, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(*numbers))
        yield


_GENERATOR = threading.RLock()
