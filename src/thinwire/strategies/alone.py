"""One machine alone: the baseline that training over a network must beat."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.tensors import named_persistent_buffers
from thinwire.data import Batch, Shard
from thinwire.errors import UsageError
from thinwire.exchange.gradients import GradientExchange, NoExchange, make_exchange
from thinwire.reducers.mean import mean
from thinwire.reducers.states import load_states
from thinwire.strategies.base import Strategy
from thinwire.strategies.groups import ranks_by_node
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import average_buffers, replicate
from thinwire.surgery.memory_format import usual_copy


class Alone(Strategy):
    """Every machine trains by itself on all the data; machines send each other nothing.

    θ ← θ − η·opt((1/m)·Σᵢ ∇Lᵢ(θ)) over the m ranks of a machine. The m ranks share the batch that all ranks share with
    other strategies, so updates and samples are as many. A machine is a node; if all ranks are on one node, each rank
    is a machine. The result is the model of rank 0's machine. Wire bytes per rank and step: between machines 0; inside
    a machine 2(m−1)/m·4P, and a small all-reduce of one number per tensor. It tells whether any rank of the machine
    used the tensor: a parameter may get no gradient in a step, as in plain training.

    This is the baseline that training over a network must beat. All machines train at the same time. So simulated
    hosts share the cores of this machine as they do with any other strategy, and times can be compared.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, comm: Comm, /) -> None:
        machines = _machines(comm)
        self.comm = comm
        self.machine = comm.split(machines, "machine")
        self.shard = Shard(self.machine.rank, self.machine.size)
        self.sees_loss = any({0, comm.rank} <= set(machine) for machine in machines)  # the result is rank 0's model
        self.model = model
        replicate(model, comm)
        self.learner = Learner(model, recipe)
        self.exchange: GradientExchange = NoExchange(model)
        if self.machine.size > 1:  # unused parameters, because a machine of one rank allows them too
            self.exchange = make_exchange(model, mean(), self.machine, unused_parameters=True)

    def step(self, batch: Batch) -> Tensor:
        loss = self.learner.backward(batch, self.exchange)
        self.learner.update()
        return loss

    def end_epoch(self) -> None:
        """Nothing to do: parameters never differ between the ranks of a machine."""

    def consolidate(self) -> nn.Module:
        """The model of rank 0's machine, on every rank."""
        whole = usual_copy(self.model)
        average_buffers(whole, self.machine)
        with self.comm.ledger.purpose("sync", instead_of="train"):
            coalesced([*whole.parameters(), *named_persistent_buffers(whole).values()], self.comm.broadcast)
        return whole

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict(), "reducer": self.exchange.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = load_states(self.exchange.states, state["reducer"])


def _machines(comm: Comm) -> list[list[int]]:
    """The ranks of each machine. All machines must have the same number of ranks."""
    nodes = ranks_by_node(comm)
    sizes = [len(node) for node in nodes]
    if len(nodes) == 1:
        return [[rank] for rank in range(comm.size)]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"alone: nodes have {', '.join(map(str, sizes))} ranks, but every machine must have the same number; "
            "start as many ranks on every node"
        )
    return nodes
