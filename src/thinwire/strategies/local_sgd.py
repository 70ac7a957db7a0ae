"""Local SGD and DiLoCo: ranks train separately, and average their parameters every few steps."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.data import Batch, Shard
from thinwire.errors import RunError, UsageError
from thinwire.exchange.gradients import NoExchange
from thinwire.exchange.parameters import Outer, ParameterAverager
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.strategies.base import Strategy
from thinwire.strategies.learner import Learner, Recipe
from thinwire.strategies.replicas import averaged_copy, averaged_state, replicate
from thinwire.surgery.moments import OptimizerState


class Periodic(Strategy):
    """Local steps; every `every` steps each fragment of the parameters is averaged, and merged `delay` steps later.

    Fragments take turns, evenly spread over the `every` steps, so that one at a time is in flight. At the end of an
    epoch all of them are averaged, and all ranks are equal.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, comm: Comm, reducer: Reducer, every: int, fragments: int = 1,
        delay: int = 0, outer: Outer = Outer(),
    ) -> None:  # fmt: skip
        self.shard = Shard(comm.rank, comm.size)
        self.comm = comm
        self.model = model
        self.every = every
        self.delay = delay
        replicate(model, comm)
        self.learner = Learner(model, recipe)
        self.no_exchange = NoExchange(model)
        own_group = comm.split([range(comm.size)], comm.link)  # so that exchanges in flight disturb no other operation
        self.averaging = ParameterAverager(model, reducer, own_group, fragments, outer)
        starts = [(i + 1) * every // fragments % every for i in range(fragments)]
        self.fragment_at = {steps: fragment for fragment, steps in enumerate(starts)}  # steps modulo `every`
        self.num_steps = 0  # in this epoch
        self.steps_in_flight = 0  # since the last exchange began
        self.has_local_steps = [False] * fragments  # since each fragment was last exchanged

    def begin_epoch(self, num_steps: int | None) -> None:
        if num_steps is not None and num_steps < self.every and self.comm.size > 1:
            say(
                f"every={self.every}, but an epoch has {num_steps} steps and ranks are averaged at its end: more than "
                f"{num_steps} saves nothing. To communicate less often, call trainer.step without tw.epoch",
                self.comm.rank,
                once=True,
            )

    def step(self, batch: Batch) -> Tensor:
        loss = self.learner.backward(batch, self.no_exchange)
        self.learner.update()
        self.has_local_steps = [True] * len(self.has_local_steps)
        self.num_steps += 1
        self.steps_in_flight += 1
        is_due = bool(self.averaging.in_flight) and self.steps_in_flight == self.delay
        fragment = self.fragment_at.get(self.num_steps % self.every)
        if is_due and self.averaging.in_flight[0].fragment == fragment:
            self.averaging.merge()
            is_due = False
        if fragment is not None:  # sent before the wait for the last one, so that the wire is not idle between the two
            self._start_exchange(fragment, with_snapshot=self.delay > 0)
        if is_due or (fragment is not None and not self.delay):
            self.averaging.merge()  # waits, if the result has not arrived
        return loss

    def end_epoch(self) -> None:
        if self.averaging.in_flight:
            self.averaging.merge()
        fragments = [i for i, has_steps in enumerate(self.has_local_steps) if has_steps]
        for fragment in fragments:
            self._start_exchange(fragment, with_snapshot=False)
        for _ in fragments:
            self.averaging.merge()
        self.num_steps = 0

    def _start_exchange(self, fragment: int, with_snapshot: bool) -> None:
        """With a snapshot if training continues before the merge."""
        self.averaging.start(fragment, with_snapshot=with_snapshot)
        self.has_local_steps[fragment] = False
        self.steps_in_flight = 0

    @property
    def is_in_sync(self) -> bool:
        """Whether all ranks have the same parameters."""
        return not self.averaging.in_flight and not any(self.has_local_steps)

    def consolidate(self) -> nn.Module:
        """The mean of the parameters of all ranks. An exchange in flight is not merged before."""
        return averaged_copy(self.model, self.comm, self.averaging.names if not self.is_in_sync else [])

    def optimizer_state(self) -> dict[str, OptimizerState]:
        """The mean of the momenta of all ranks."""
        return averaged_state(self.model, self.learner.optimizer, self.comm)

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(), "averaging": self.averaging.state_dict(),
            "num_steps": self.num_steps, "steps_in_flight": self.steps_in_flight,
            "has_local_steps": list(self.has_local_steps), "period": [self.every, self.delay],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (len(state["has_local_steps"]), *state["period"]) != (len(self.has_local_steps), self.every, self.delay):
            raise RunError("the saved state is of other options: every, wait or fragments; use the same ones")
        self.averaging.load_state_dict(state["averaging"])
        self.learner.load_state_dict(state["learner"])
        self.num_steps, self.steps_in_flight = state["num_steps"], state["steps_in_flight"]
        self.has_local_steps = list(state["has_local_steps"])


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
        inner = max(group.get("momentum", 0.0) for group in self.learner.optimizer.param_groups)
        if min(inner, outer_momentum) > 0.5:
            say(
                f"diloco: the optimizer's momentum of {inner} and outer_momentum={outer_momentum} add up, and the run "
                "may diverge; try outer_momentum=0.5, or the optimizer adamw",
                comm.rank,
            )
