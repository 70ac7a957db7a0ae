"""Local SGD and DiLoCo: ranks train separately, and average their parameters every few steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.data import Batch, Shard
from thinwire.errors import UsageError
from thinwire.exchange.gradients import NoExchange
from thinwire.exchange.parameters import Outer, ParameterAverager
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import averaged_copy, averaged_state, replicate
from thinwire.strategies.rounds import InRounds, Rounds
from thinwire.surgery.moments import OptimizerState


class Periodic(InRounds, abstract=True):
    """Local steps, and rounds: at the end of an epoch all ranks are equal.

    In a loop of the user's own (tw.rounds) there is no learner, and `comm` is used for nothing else.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, comm: Comm, reducer: Reducer, every: int, fragments: int = 1,
        delay: int = 0, outer: Outer = Outer(),
    ) -> None:  # fmt: skip
        self.shard, self.comm, self.model = Shard(comm.rank, comm.size), comm, model
        replicate(model, comm)
        self.own_loop = recipe.own_loop
        if not self.own_loop:
            self.learner = Learner(model, recipe)
        self.no_exchange = NoExchange(model)
        own_group = comm if self.own_loop else comm.split([range(comm.size)], comm.link)  # nothing else is sent there
        self.rounds = Rounds(ParameterAverager(model, reducer, own_group, fragments, outer), every, delay)

    def begin_epoch(self, num_steps: int | None) -> None:
        every = self.rounds.every
        if num_steps is not None and num_steps < every and self.comm.size > 1:
            say(
                f"every={every}, but an epoch has {num_steps} steps and ranks are averaged at its end: more than "
                f"{num_steps} saves nothing. To communicate less often, call trainer.step without tw.epoch",
                self.comm.rank,
                once=True,
            )

    def step(self, batch: Batch) -> Tensor:
        loss = self.learner.backward(batch, self.no_exchange)
        self.learner.update()
        self.after_step()
        return loss

    def after_step(self, loss: Tensor | None = None) -> None:
        self.rounds.after_step()

    def use_replicas(self, replicas: Sequence[Sequence[int]]) -> None:
        """One rank of each replica exchanges, and the others get the result."""
        rails = [list(ranks) for ranks in zip(*(ranks[:1] for ranks in replicas), strict=True)]
        others = [[rank] for ranks in replicas for rank in ranks[1:]]
        between, node = self.comm.split([*rails, *others], "between"), self.comm.split(replicas, "node")
        self.rounds.averaging.use_nodes(between, node, weight=node.size * len(replicas) / self.comm.size)

    def end_epoch(self) -> None:
        self.meet()

    def meet(self) -> None:
        self.rounds.together()

    def consolidate(self) -> nn.Module:
        """The mean of the parameters of all ranks. An exchange in flight is not merged before."""
        averaged = self.rounds.averaging.names if not self.rounds.is_in_sync else []
        return averaged_copy(self.model, self.comm, averaged)

    def optimizer_state(self) -> dict[str, OptimizerState]:
        """The mean of the momenta of all ranks."""
        return averaged_state(self.model, self.learner.optimizer, self.comm)

    def state_dict(self) -> dict[str, Any]:
        learner = {} if self.own_loop else {"learner": self.learner.state_dict()}
        return learner | self.rounds.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds.load_state_dict(state)
        if not self.own_loop:
            self.learner.load_state_dict(state["learner"])


class LocalSGD(Periodic):
    """Every rank trains on its own; the parameters are averaged every few steps.

    xᵢ ← xᵢ − η·opt(∇Lᵢ(xᵢ)), and after each `every` steps xᵢ ← (1/n)·Σⱼ xⱼ. The reducer averages the movements since
    the last average. Wire bytes per rank and step: those of the reducer / every. Momentum stays each rank's own.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        every: PositiveInt = 8,  # steps between averages; higher = fewer bytes, ranks differ more
        reducer: Reducer = mean(),  # how the ranks' changes since the last average are averaged
    ) -> None:
        super().__init__(model, recipe, comm, reducer, every)


class DiLoCo(Periodic):
    """Local SGD with an outer optimizer, whose gradient is the mean change of many local steps.

    Δ = x̂ − (1/n)·Σᵢ xᵢ;  m ← μ·m + Δ;  x̂ ← x̂ − ν·(Δ + μ·m);  xᵢ ← x̂ + (what rank i learned while Δ was in flight).
    With `fragments` the model is averaged in parts that take turns, each while training continues (streaming). Wire
    bytes per rank and step: those of the reducer / every. The inner optimizer's state stays each rank's own.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; and "Streaming DiLoCo
    with overlapping communication", 2025.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        every: PositiveInt = 16,  # steps between outer steps; higher = fewer bytes, ranks differ more
        outer_lr: PositiveFloat = 0.7,  # ν: learning rate of the outer optimizer; 1 = all the way to the mean
        outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5,  # μ: outer momentum; try 0.9 for long runs
        fragments: PositiveInt = 1,  # parts of the model, exchanged in turn; more = smaller messages, more often
        wait: NonNegativeInt | None = None,  # steps from sending to merging; default: 0, with fragments every/fragments
        reducer: Reducer = mean(),  # how the ranks' changes since the last outer step are averaged
    ) -> None:
        longest = every // fragments
        if fragments > every:
            raise UsageError(
                f"diloco: {fragments} fragments in {every} steps; try fragments={every} or every={fragments}"
            )
        if wait is not None and wait > longest:
            raise UsageError(
                f"diloco: wait={wait}, but after {longest} steps the next exchange begins "
                f"(every={every}, fragments={fragments}); possible: 0 to {longest}"
            )
        delay = wait if wait is not None else (0 if fragments == 1 else longest)
        super().__init__(model, recipe, comm, reducer, every, fragments, delay, Outer(outer_lr, outer_momentum))
        if recipe.own_loop:
            return
        inner = max(group.get("momentum", 0.0) for group in self.learner.optimizer.param_groups)
        if min(inner, outer_momentum) > 0.5:
            say(
                f"diloco: the optimizer's momentum of {inner} and outer_momentum={outer_momentum} add up, and the run "
                "may diverge; try outer_momentum=0.5, or the optimizer adamw",
                comm.rank,
            )
