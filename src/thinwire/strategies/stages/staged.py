"""Staged: what strategies have in common that cut the model into stages, each on ranks of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.messages import say
from thinwire.common.tensors import named_tensors
from thinwire.errors import RunError, UsageError
from thinwire.exchange.gradients import AfterBackward, GradientExchange, NoExchange
from thinwire.reducers.base import Reducer
from thinwire.reducers.states import load_states
from thinwire.strategies.base import Strategy
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import replicate
from thinwire.strategies.series import Series
from thinwire.strategies.stages.costs import add_up_costs
from thinwire.strategies.stages.cut_model import CutModel, Stage
from thinwire.strategies.stages.cutting import Cut, cut_into_blocks, find_starts, layer_names
from thinwire.strategies.stages.layout import StageLayout, choose_num_stages
from thinwire.surgery.costs import activations, flops
from thinwire.surgery.memory_format import is_view_error
from thinwire.surgery.segments import follow, segments_of

EXAMPLE_SAMPLES = 2
BUCKET_MB = 25.0


class Staged(Strategy, abstract=True):
    """A strategy whose ranks are stages × replicas.

    The first batch shows what passes between the layers of the model. So the model is cut in the first step, or by
    `begin`, and only then does a rank know its stage.
    """

    keeps_model = False
    checks_targets = True

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
        cut_at = layer_names(name, cut)
        if recipe.batch_loss.kind != "output":
            raise UsageError(
                f"{name} cuts the model into blocks, and only the last one knows the output; give a loss of (output, "
                "targets), and batches of (inputs, targets), two tensors"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise UsageError("the model has no parameter to train; set requires_grad on at least one")
        self.name, self.comm, self.recipe, self.cut, self.reducer = name, comm, recipe, cut, reducer
        self.device = next(model.parameters()).device
        self.segments = segments_of(model, cut_at)
        self.layout = StageLayout(comm, choose_num_stages(name, cut_at, blocks, self.segments, comm))
        self.shard, self.sees_loss = self.layout.shard, self.layout.is_last
        self.model: nn.Module = model  # from the first step on: this rank's stage
        replicate(model, comm)
        self.steps_are_alike = not reducer.has_phases
        self.has_begun = False
        self.steps_left = 0  # of this epoch, after the current one

    def begin_epoch(self, num_steps: int | None) -> None:
        self.steps_left = self.steps_left or num_steps or 0  # a run that resumes in mid-epoch has some left

    def end_epoch(self) -> None:
        self.steps_left = 0

    # ---- the first step

    def begin(self, inputs: Tensor, starts: Sequence[int] | None = None) -> None:
        """Cut the model, for inputs like these; every rank keeps its own stage. Collective."""
        self.example = inputs[:EXAMPLE_SAMPLES].detach().clone().to(self.device)
        self.segments = follow(self.model, self.segments, self.example)
        passed = activations([segment.module for segment in self.segments], self.example)
        if starts is None:
            starts = find_starts(self.cut, self.layout.num_stages, self.segments, passed[:-1], self.comm)
        self.starts = list(starts)
        blocks = cut_into_blocks(self.name, self.model, self.segments, self.starts)
        ends = [*self.starts[1:], len(self.segments)]
        heads = self.make_heads(passed, ends)
        with self.comm.ledger.purpose("start"):
            weights = [t for head in heads if head is not None for t in named_tensors(head.to(self.device)).values()]
            coalesced(weights, self.comm.broadcast)
        stages = [Stage(block, head) for block, head in zip(blocks, heads, strict=True)]
        index = self.layout.stage_index
        self._count_costs(stages[index], passed[self.starts[index]], passed[ends[index]])
        self.cut_model = CutModel(self.model, stages, self.layout, self.comm)
        self.model = self.stage = self.cut_model.stage
        self.learner = Learner(self.stage, self.recipe)
        self._try_channels_last(passed[self.starts[index]])
        self.exchange = self._make_exchange()
        self.has_begun = True

    def _try_channels_last(self, z_in: Tensor) -> None:
        """Go back to the usual order if this rank's block cannot compute in channels_last."""
        if self.learner.is_channels_last:
            try:
                activations([self.stage.block], z_in)
            except RuntimeError as error:
                if not is_view_error(error):
                    raise
                self.learner.give_up_channels_last()

    def make_heads(self, passed: Sequence[Tensor], ends: Sequence[int]) -> list[nn.Module | None]:
        """A head for each block, or none.

        `passed` has an example of what goes into each segment, and of the model's output; block k goes up to segment
        `ends[k]`.
        """
        return [None] * self.layout.num_stages

    def training_flops(self, stage: Stage, z_in: Tensor, z: Tensor) -> int:
        """Operations of this rank's stage in training, for an example of its input and output."""
        return self._backprop_flops(stage, z_in)

    def _backprop_flops(self, stage: Stage, z_in: Tensor) -> int:
        return flops(stage.block, z_in, input_gradient=not self.layout.is_first)

    def _count_costs(self, stage: Stage, z_in: Tensor, z: Tensor) -> None:
        """Add up what all stages cost, and say so if one makes the others wait. Collective."""
        own, backprop = self.training_flops(stage, z_in, z), self._backprop_flops(stage, z_in)
        self.costs = add_up_costs(own, backprop, len(self.example), self.layout.stages)
        if self.costs.are_unequal and self.cut != "time":
            dearest = self.costs.dearest
            first_layer = self.segments[self.starts[dearest]].name
            head, other_head = (", its head's included,", ", or another head") if stage.head else ("", "")
            say(
                f"note: {self.name}: block {dearest + 1} of {self.layout.num_stages}, from layer {first_layer} on, has "
                f"{100 * max(self.costs.shares):.0f} % of the operations{head} and the other ranks wait for it; to "
                f"balance them, try fewer blocks, or another cut{other_head}",
                self.comm.rank,
                once=True,
            )

    def _make_exchange(self) -> GradientExchange:
        if self.layout.num_replicas == 1:
            return NoExchange(self.stage)
        return AfterBackward(self.stage, self.reducer, self.layout.replicas, BUCKET_MB, False)

    # ---- every step

    def check_targets(self, fingerprint_before: int, fingerprint_here: int) -> None:
        """Raise UsageError if the previous stage read another batch: its activations would meet other targets."""
        if fingerprint_before != fingerprint_here:
            index = self.layout.stage_index
            raise UsageError(
                f"{self.name}: stage {index + 1} of {self.layout.num_stages} was given other targets than stage "
                f"{index} in step {self.learner.num_steps + 1}; all stages of a replica must read the same batches in "
                "the same order. Use tw.loader(data, trainer.shard, batch_size), or DistributedSampler(data, "
                "num_replicas=trainer.shard.count, rank=trainer.shard.index)"
            )

    # ---- the whole model, and states

    def status(self) -> dict[str, Any]:
        """Where blocks begin, how much of the operations each has, and what a sample costs in training."""
        if not self.has_begun:
            return {}
        return {
            "blocks": [self.segments[start].name for start in self.starts],
            "operation_shares": [round(share, 3) for share in self.costs.shares],
            "operations": [self.costs.flops_per_sample, self.costs.backprop_flops_per_sample],
        }

    def representatives(self) -> list[int]:
        """The first replica of each stage."""
        return [rank // self.layout.num_replicas * self.layout.num_replicas for rank in range(self.comm.size)]

    def consolidate(self) -> nn.Module:
        return self.cut_model.consolidate() if self.has_begun else copy.deepcopy(self.model)

    def state_dict(self) -> dict[str, Any]:
        if not self.has_begun:
            return {"model": self.model.state_dict()}
        return {
            "example": torch.zeros_like(self.example), "starts": self.starts,
            "learner": self.learner.state_dict(), "reducer": self.exchange.states, "steps_left": self.steps_left,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "starts" not in state:
            if self.has_begun:
                raise RunError(
                    "the saved state is of a trainer before its first step, but this one has begun; use a new one"
                )
            self.model.load_state_dict(state["model"])
            return
        starts = state["starts"]
        if len(starts) != self.layout.num_stages or (self.has_begun and starts != self.starts):
            raise RunError(f"the saved state has blocks that begin at segments {starts}; use the same cut")
        if not self.has_begun:
            self.begin(state["example"], starts)
        self.steps_left = state["steps_left"]
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = load_states(self.exchange.states, state["reducer"])
