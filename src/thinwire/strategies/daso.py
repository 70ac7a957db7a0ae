"""DASO: gradients averaged inside nodes, parameters between them, and those without waiting."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.messages import say
from thinwire.data import Batch, Shard
from thinwire.errors import UsageError
from thinwire.exchange.gradients import make_exchange
from thinwire.exchange.parameters import ParameterAverager, keep_progress
from thinwire.reducers.base import Reducer
from thinwire.reducers.half import bf16
from thinwire.reducers.mean import mean
from thinwire.reducers.states import load_states
from thinwire.strategies.base import Strategy
from thinwire.strategies.groups import groups_of, nodes_of
from thinwire.strategies.learner import Learner, Recipe
from thinwire.strategies.replicas import consolidated, replicate

PATIENCE = 3  # epochs in a row without improvement, until the loss counts as stable


@dataclass(frozen=True)
class Cycle:
    """How often ranks talk while nodes cycle: B, W and l of the paper."""

    between: int = 4  # B: batches from one exchange between nodes to the next
    wait: int = 1  # W: batches until its result is merged
    inside: int = 1  # l: gradients are averaged inside a node every so many batches

    def after_plateau(self, longest: int) -> Cycle:
        """Talk twice as often; from every batch, back to the longest pause."""
        if self.between > 1:
            between = self.between // 2
            return Cycle(between, min(between, max(1, self.wait - 1)), max(1, self.inside // 2))
        return Cycle(longest, max(1, longest // 4), max(1, longest // 4))


@dataclass(frozen=True)
class Plateau:
    """Tells when a loss has stopped improving: three epochs in a row not below 1 − stability of the best."""

    best: float = float("inf")
    failures: int = 0

    def after(self, loss: float, stability: float) -> Plateau:
        """One epoch more."""
        if loss < self.best - stability * abs(self.best) or self.best == float("inf"):
            return Plateau(loss)
        return Plateau(self.best, self.failures % PATIENCE + 1)

    @property
    def stable(self) -> bool:
        return self.failures == PATIENCE


class DASO(Strategy):
    """Average gradients inside a node every batch, and parameters between nodes now and then, without waiting.

    Inside a node gradients are averaged in every batch. Between nodes one rank of each, in turns ("rails"), averages
    parameters. In the first and last epochs that is after every batch, and everybody waits. In between (cycling) it
    begins every B batches, training goes on, and W batches later x ← (2W·x + Σₖ xₖˢᵉⁿᵗ)/(2W + N) for N nodes
    (`merge=paper`), or x ← x + (mean of what was sent − what this node sent) (`delta`). When the loss stops
    improving, B is halved, down to 1, and then starts again from `max_global_skips`. Wire bytes between nodes, per node
    and batch, of P parameters: 2(N−1)/N·2P, cycling 1/B of that (bf16). Momentum stays each rank's own.

    Coquelin et al., "Accelerating neural network training with distributed asynchronous and selective optimization
    (DASO)", Journal of Big Data 9, 2022.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        ranks_per_node: PositiveInt | None = None,  # ranks that count as a node; default: those started on one machine
        warmup_epochs: NonNegativeInt = 4,  # first epochs in which nodes wait for each other after every batch
        cooldown_epochs: NonNegativeInt = 4,  # last epochs in which nodes wait for each other after every batch
        max_global_skips: PositiveInt = 8,  # most batches between two exchanges of the nodes; higher = fewer bytes
        stability: Annotated[
            float, Field(ge=0, le=1)
        ] = 0.05,  # share by which an epoch's loss must fall to count as an improvement
        merge: Literal["paper", "delta"] = "paper",  # late mean: paper = average with it, delta = add the difference
        reducer: Reducer = bf16(),  # how changes of the parameters are averaged between nodes
        local_reducer: Reducer = mean(),  # how gradients are averaged inside a node
    ) -> None:
        self.shard = Shard(comm.rank, comm.size)
        self.comm = comm
        self.model = model
        self.phases = _phases(recipe.epochs, warmup_epochs, cooldown_epochs)
        self.max_global_skips, self.stability, self.merge_rule = max_global_skips, stability, merge
        replicate(model, comm)
        self.learner = Learner(model, recipe)

        nodes = _nodes(comm, ranks_per_node)
        mine = next(node for node in nodes if comm.rank in node)
        self.num_nodes, self.num_rails = len(nodes), min(map(len, nodes))
        if comm.rank == 0 and self.num_nodes > 1:
            _tell_if_short(recipe.epochs or 0, self.phases)
        self.node = comm.split(nodes, "node")
        self.exchange = make_exchange(model, local_reducer, self.node)
        rails = [[node[i] for node in nodes] for i in range(self.num_rails)]
        without = [[rank] for node in nodes for rank in node[self.num_rails :]]
        weight = len(mine) * len(nodes) / comm.size
        across = comm.split([*rails, *without], "between")
        speaking = comm.split(nodes, "node")  # apart from gradients, which travel at the same time
        self.averaging = ParameterAverager(model, reducer, across, node=speaking, weight=weight)

        self.cycle = Cycle(between=min(4, max_global_skips))
        self.plateau = Plateau()
        self.rail = 0  # whose turn it is
        self.epoch, self.batch = 0, 0
        self.in_flight = 0  # batches since the exchange began
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self.together = True  # every rank's parameters are the same
        self.apart = False  # ranks of a node have had gradients, and so momenta, of their own

    def step(self, batch: Batch) -> Tensor:
        cycling = self.cycling
        loss = self.learner.backward(batch, self.exchange, exchanging=not cycling or self._talks_inside())
        self.learner.update()
        self.together = False
        self.loss_sum = self.loss_sum.to(loss.device) + loss.detach()
        self.in_flight += 1
        if not cycling:
            self._meet()
        else:
            if self.averaging.in_flight is not None and self.in_flight == self.cycle.wait:
                self._merge()
            if self.batch % self.cycle.between == 0:
                self._start()
        self.batch += 1
        return loss

    def end_epoch(self) -> None:
        if not self.batch:
            return
        if self.averaging.in_flight is not None:
            self._merge()
        if not self.together:
            self._meet()
        self._adapt()
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum = torch.zeros((), dtype=torch.float64)

    @property
    def cycling(self) -> bool:
        """Whether nodes do not wait for each other in this epoch."""
        warmup, cooldown = self.phases
        return self.num_nodes > 1 and warmup <= self.epoch < cooldown

    def _talks_inside(self) -> bool:
        """Every l batches, and from the start of an exchange to its merge: what goes out or comes in is the node's."""
        started = self.batch % self.cycle.between == 0
        return started or self.averaging.in_flight is not None or self.batch % self.cycle.inside == 0

    # ---- between nodes

    def _start(self, in_background: bool = True) -> None:
        """A rank of each node takes its node's parameters to the others; the next time another one does."""
        self.averaging.start(leader=self.rail, average_node=self.apart, in_background=in_background)
        self.rail = (self.rail + 1) % self.num_rails
        self.in_flight = 0

    def _merge(self) -> None:
        if self.merge_rule == "delta":
            self.averaging.merge(keep_progress)
            return
        self.averaging.merge(self._paper)
        if self.apart:  # else the ranks of a node are equal already
            coalesced(self.averaging.fragments[0].x, self.node.mean)

    def _meet(self) -> None:
        """Start, wait and merge: then all ranks are equal."""
        if self.num_nodes > 1:
            self._start(in_background=False)
            self.averaging.merge()
        self.together = True

    def _paper(self, x: Tensor, sent: Tensor, agreed: Tensor) -> None:
        """x ← (2S·x + Σₖ xₖˢᵉⁿᵗ)/(2S + N), S batches after it was sent; for S = 0, 1 instead of 2S."""
        own, others = 2 * self.in_flight or 1, self.num_nodes
        x.mul_(own / (own + others)).add_(agreed, alpha=others / (own + others))

    def _adapt(self) -> None:
        """All ranks see the same mean loss, so they agree on the next cycle."""
        if not self.cycling:
            return
        with self.comm.ledger.purpose("sync"):
            loss = float(self.comm.mean(self.loss_sum / self.batch))
        self.plateau = self.plateau.after(loss, self.stability)
        if self.plateau.stable:
            self.cycle = self.cycle.after_plateau(self.max_global_skips)
            self.apart = self.apart or self.cycle.inside > 1

    # ---- results and states

    def consolidate(self) -> nn.Module:
        """The mean over ranks. What is under way is part of it: no node gives up its own steps while it waits."""
        if self.batch and not self.epoch:
            say(
                f"daso is in its first epoch after {self.batch} batches; if it is over, say so: tw.epoch",
                self.comm.rank,
                once=True,
            )
        return consolidated(self.model, self.comm, self.averaging.names if not self.together else [])

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(), "averaging": self.averaging.state_dict(),
            "local_reducer": self.exchange.states, "cycle": asdict(self.cycle), "plateau": asdict(self.plateau),
            "loss_sum": self.loss_sum, "counts": {name: getattr(self, name) for name in COUNTS},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaging.load_state_dict(state["averaging"])
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = load_states(self.exchange.states, state["local_reducer"])
        self.cycle, self.plateau = Cycle(**state["cycle"]), Plateau(**state["plateau"])
        self.loss_sum = state["loss_sum"]
        for name in COUNTS:
            setattr(self, name, state["counts"][name])


COUNTS = ("epoch", "batch", "in_flight", "rail", "together", "apart")


def _phases(epochs: int | None, warmup: int, cooldown: int) -> tuple[int, int]:
    """The first epoch of cycling, and the first after it."""
    if epochs is None:
        raise UsageError(
            "daso has phases, so it must know how many epochs there will be: prepare(…, epochs=90), and at the end of "
            "each trainer.end_epoch(), which tw.epoch(trainer, batches, comm) does for you"
        )
    if warmup + cooldown > epochs:
        raise UsageError(
            f"daso: warmup_epochs={warmup} and cooldown_epochs={cooldown} are longer than the run of {epochs} epochs; "
            f"try {warmup + cooldown + 1} epochs or more, or daso(warmup_epochs={epochs // 4}, "
            f"cooldown_epochs={epochs // 4})"
        )
    return warmup, epochs - cooldown


def _tell_if_short(epochs: int, phases: tuple[int, int]) -> None:
    """Say so if nodes spend most of a run waiting for each other: then more may be sent than by data_parallel."""
    cycling = phases[1] - phases[0]
    if 2 * cycling >= epochs:
        return
    few = f"{epochs - cycling} of them" if cycling else "all of them"
    some = min(max(1, epochs // 8), epochs // 4)
    say(
        f"daso: with {epochs} epochs {few} are first or last ones, and nodes always wait there, after every "
        f"batch; to save bytes try daso(warmup_epochs={some}, cooldown_epochs={some}), or more epochs"
    )


def _nodes(comm: Comm, ranks_per_node: int | None) -> list[list[int]]:
    """The ranks of each node."""
    nodes = nodes_of(comm) if ranks_per_node is None else groups_of(comm, ranks_per_node, "daso: ranks_per_node")
    if len(nodes) == 1:
        several = f"more than {ranks_per_node} ranks make" if ranks_per_node else "ranks_per_node=… makes"
        say(f"daso: all ranks are on one node, so this is data_parallel; {several} several nodes", comm.rank)
    return nodes
