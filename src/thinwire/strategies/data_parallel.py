"""Data parallelism: the reference that every other strategy is measured against."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.data import Batch, Shard
from thinwire.errors import UsageError
from thinwire.exchange.gradients import make_exchange
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.reducers.states import load_states
from thinwire.strategies.base import Strategy
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import averaged_copy, replicate
from thinwire.surgery.moments import OptimizerState, states_by_name


class DataParallel(Strategy):
    """Average the gradients of all ranks in every step.

    θ ← θ − η·opt((1/n)·Σᵢ ∇Lᵢ(θ)): with the exact mean, n ranks with batch b compute what one rank would with
    batch n·b. Gradients are sent while the backward pass continues. Wire bytes per rank and step: those of the
    reducer; for `mean`, 2(n−1)/n·4P.

    Buffers (BatchNorm's running statistics) stay local while training, where they have no effect, and are
    averaged in the model that `consolidate` returns. DDP would instead send rank 0's before every step.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        reducer: Reducer = mean(),  # how gradients are averaged
        bucket_mb: Annotated[float, Field(gt=0)] = 25.0,  # size of a bucket; lower = sends earlier, more messages
        unused_parameters: bool = False,  # true = some parameters may get no gradient in a step; costs a graph search
    ) -> None:
        if recipe.compile and bucket_mb < 1:
            raise UsageError(f"data_parallel: bucket_mb={bucket_mb}, but with compile possible: 1 or more")
        self.shard = Shard(comm.rank, comm.size)
        self.comm, self.steps_are_alike = comm, not reducer.has_phases
        self.model = model
        replicate(model, comm)
        self.learner = Learner(model, recipe)
        self.exchange = make_exchange(model, reducer, comm, bucket_mb, unused_parameters)

    def step(self, batch: Batch) -> Tensor:
        loss = self.learner.backward(batch, self.exchange)
        self.learner.update()
        return loss

    def end_epoch(self) -> None:
        """Nothing to do: parameters never differ between ranks."""

    def consolidate(self) -> nn.Module:
        return averaged_copy(self.model, self.comm)

    def optimizer_state(self) -> dict[str, OptimizerState]:
        return states_by_name(self.model, self.learner.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict(), "reducer": self.exchange.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = load_states(self.exchange.states, state["reducer"])
