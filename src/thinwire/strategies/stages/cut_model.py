"""A model that was cut into stages: a rank holds the tensors of its own stage, and the shapes of all others."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.tensors import named_tensors
from thinwire.strategies.replicas import average_buffers
from thinwire.strategies.stages.layout import StageLayout
from thinwire.surgery.memory_format import usual_copy
from thinwire.surgery.meta import to_meta, with_tensors


class Stage(nn.Module):
    """What one rank trains: a block and, if the block has a local loss, the head that computes it."""

    def __init__(self, block: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.block: nn.Module = block
        self.head: nn.Module | None = head


class CutModel:
    """`stage` is this rank's own; `stages` and `model` are on the meta device: their tensors are taken out."""

    def __init__(self, model: nn.Module, stages: Sequence[Stage], layout: StageLayout, comm: Comm) -> None:
        self.layout, self.comm = layout, comm
        self.device = next(model.parameters()).device
        names = {id(t): name for name, t in named_tensors(model).items()}
        self.names_in_model = [{n: names.get(id(t), "") for n, t in named_tensors(s).items()} for s in stages]
        self.stage = copy.deepcopy(stages[layout.stage_index])
        in_stages = {name for names_of_stage in self.names_in_model for name in names_of_stage.values()}
        self.unused = {name: t for name, t in to_meta(model).items() if name not in in_stages}  # in no block
        for stage in stages:
            to_meta(stage)
        self.model, self.stages = model, stages

    def consolidate(self) -> nn.Module:
        """The whole model on every rank. Collective."""
        tensors = {
            names[n]: t
            for names, tensors_of_stage in zip(self.names_in_model, self.gather(), strict=True)
            for n, t in tensors_of_stage.items()
        }
        return with_tensors(self.model, self.unused | tensors)

    def gather_exits(self) -> list[nn.Module]:
        """The blocks up to each head, with that head. Collective."""
        gathered = self.gather(heads=True)
        stages = [with_tensors(stage, tensors) for stage, tensors in zip(self.stages, gathered, strict=True)]
        blocks = [stage.get_submodule("block") for stage in stages]
        return [
            nn.Sequential(*blocks[: k + 1], stage.get_submodule("head"))
            for k, stage in enumerate(stages)
            if stage.head is not None
        ]

    def gather(self, heads: bool = False) -> list[dict[str, Tensor]]:
        """Every stage's tensors on every rank, with or without those of heads. Collective."""
        own = usual_copy(self.stage)
        average_buffers(own, self.layout.replicas)
        gathered = []
        with self.comm.ledger.purpose("sync", instead_of="train"):
            for index, stage in enumerate(self.stages):
                all_tensors = named_tensors(own if index == self.layout.stage_index else stage)
                tensors = {
                    name: torch.empty_like(t, device=self.device) if t.is_meta else t.detach()
                    for name, t in all_tensors.items()
                    if heads or name.startswith("block.")
                }
                root = self.layout.rank_of(index, replica=0)
                coalesced(list(tensors.values()), lambda t, root=root: self.comm.broadcast(t, root))  # type: ignore[misc]
                gathered.append(tensors)
        return gathered
