"""DASO: gradients are averaged inside nodes; parameters between nodes, while training continues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
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
from thinwire.strategies.daso_schedule import Cycle, Plateau, cycling_epochs, say_if_mostly_waiting
from thinwire.strategies.groups import choose_nodes
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import averaged_copy, averaged_state, replicate
from thinwire.strategies.rounds import InRounds
from thinwire.surgery.moments import OptimizerState


class DASO(InRounds):
    """Average gradients inside nodes, and parameters between nodes every few batches while training continues.

    Between nodes, one rank of each node averages parameters with its peers. Those ranks form a rail, and rails take
    turns. In the first and last epochs (warm-up, cool-down) they do so after every batch, and all ranks wait. In
    between (cycling) an exchange begins every B batches, and training continues. W batches later a rank waits for the
    result if it has not arrived, and merges it: x ← (2W·x + Σₖ xₖˢᵉⁿᵗ)/(2W + N) for N nodes (`merge=paper`), or
    x ← x + (mean of what was sent − what this node sent) (`delta`). When the loss stops improving, B is halved, down
    to 1, and then starts again from `max_global_skips`. Wire bytes between nodes, per node and batch, of P parameters:
    2(N−1)/N·2P, cycling 1/B of that (bf16). Momentum stays each rank's own.

    Coquelin et al., "Accelerating neural network training with distributed asynchronous and selective optimization
    (DASO)", Journal of Big Data 9, 2022.
    """

    has_phases = True

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
        merge: Literal["paper", "delta"] = "paper",  # of a late result: paper = average with it, delta = add the change
        reducer: Reducer = bf16(),  # how changes of the parameters are averaged between nodes
        local_reducer: Reducer = mean(),  # how gradients are averaged inside a node
    ) -> None:
        self.model, self.comm, self.shard = model, comm, Shard(comm.rank, comm.size)
        self.cycling_epochs = cycling_epochs(recipe.epochs, warmup_epochs, cooldown_epochs)
        self.max_global_skips, self.stability, self.merge_rule = max_global_skips, stability, merge
        replicate(model, comm)
        nodes = choose_nodes(comm, ranks_per_node)
        if comm.rank == 0 and len(nodes) > 1:
            say_if_mostly_waiting(recipe.epochs or 0, self.cycling_epochs)
        self.nodes, self.num_nodes = nodes, len(nodes)
        self.node = comm.split(nodes, "node")
        self.own_loop = recipe.own_loop
        if not self.own_loop:
            self.learner = Learner(model, recipe)
            self.exchange = make_exchange(model, local_reducer, self.node, unused_parameters=self.node.size == 1)
        self._make_rails(nodes, reducer)

        self.cycle, self.plateau = Cycle(global_every=min(4, max_global_skips)), Plateau()
        self.epoch, self.batch = 0, 0
        self.batches_in_flight = 0  # batches since the last exchange between nodes began
        self.loss_sum = torch.zeros((), dtype=torch.float64)  # over the batches of this epoch
        self.sees_losses = True  # of all batches
        self.is_in_sync = True  # all ranks have the same parameters
        self.node_ranks_differ = False  # since l > 1, ranks of a node have gradients, and so momenta, of their own

    def _make_rails(self, nodes: list[list[int]], reducer: Reducer) -> None:
        """Rail i has the i-th rank of every node. If nodes are of unequal size, some ranks are in no rail."""
        self.num_rails = min(map(len, nodes))
        self.rail = 0  # the rail that exchanges next
        rails = [[node[i] for node in nodes] for i in range(self.num_rails)]
        in_no_rail = [[rank] for node in nodes for rank in node[self.num_rails :]]
        is_one_rail = self.comm.link == "between"  # of shards: each rank is alone on its node
        between = self.comm if is_one_rail else self.comm.split([*rails, *in_no_rail], "between")
        inside = self.comm.split(nodes, "node")  # not self.node: gradients are averaged there at the same time
        weight = inside.size * len(nodes) / self.comm.size
        self.averaging = ParameterAverager(self.model, reducer, between, node=inside, weight=weight)

    def step(self, batch: Batch) -> Tensor:
        exchanging = not self.is_cycling or self._averages_gradients()
        loss = self.learner.backward(batch, self.exchange, exchanging)
        self.learner.update()
        self.after_step(loss)
        return loss

    def use_replicas(self, replicas: Sequence[Sequence[int]]) -> None:
        """Check that the user's replicas are the nodes."""
        if sorted(map(list, replicas)) != sorted(self.nodes):
            raise UsageError(
                f"daso: the ranks of its nodes are {self.nodes}, but those that exchange gradients are "
                f"{sorted(map(list, replicas))}; make them the same, as by daso(ranks_per_node={len(replicas[0])})"
            )

    def after_step(self, loss: Tensor | None = None) -> None:
        """Start and merge what is due. Without losses, B stays as it is."""
        is_cycling, self.is_in_sync = self.is_cycling, False
        if loss is None:
            self.sees_losses = False
        else:
            self.loss_sum = self.loss_sum.to(loss.device) + loss.detach()
        self.batches_in_flight += 1
        if not is_cycling:
            self._sync()
        else:
            if self.averaging.in_flight and self.batches_in_flight == self.cycle.delay:
                self._wait_and_merge()  # W batches after the start
            if self.batch % self.cycle.global_every == 0:
                self._start_exchange()
        self.batch += 1

    def end_epoch(self) -> None:
        if not self.batch:
            return
        self.meet()
        self._adapt_cycle()
        self.sees_losses = True
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum = torch.zeros((), dtype=torch.float64)

    def meet(self) -> None:
        if self.averaging.in_flight:
            self._wait_and_merge()
        if not self.is_in_sync:
            self._sync()

    @property
    def is_cycling(self) -> bool:
        """Whether this epoch is neither of the warm-up nor of the cool-down."""
        return self.num_nodes > 1 and self.epoch in self.cycling_epochs

    def _averages_gradients(self) -> bool:
        """Every l batches, and from the start of an exchange to its merge, so that a node sends and merges as one."""
        starts = self.batch % self.cycle.global_every == 0
        return starts or bool(self.averaging.in_flight) or self.batch % self.cycle.local_every == 0

    # ---- between nodes

    def _start_exchange(self, with_snapshot: bool = True) -> None:
        """One rail averages the nodes' parameters; the next exchange is the next rail's."""
        self.averaging.start(leader=self.rail, average_node=self.node_ranks_differ, with_snapshot=with_snapshot)
        self.rail = (self.rail + 1) % self.num_rails
        self.batches_in_flight = 0

    def _wait_and_merge(self) -> None:
        """Wait for the result of the exchange in flight, and merge it into this rank's parameters."""
        if self.merge_rule == "delta":
            self.averaging.merge(keep_progress)
            return
        self.averaging.merge(self._merge_as_paper)
        if self.node_ranks_differ:  # else the ranks of a node are equal already
            coalesced([x for bucket in self.averaging.buckets for x in bucket.x], self.node.mean)

    def _merge_as_paper(self, x: Tensor, sent: Tensor, agreed: Tensor) -> None:
        """x ← (2S·x + Σₖ xₖˢᵉⁿᵗ)/(2S + N), S batches after it was sent; for S = 0, 1 instead of 2S."""
        own, others = 2 * self.batches_in_flight or 1, self.num_nodes
        x.mul_(own / (own + others)).add_(agreed, alpha=others / (own + others))

    def _sync(self) -> None:
        """Exchange parameters and wait for the result: then all ranks are equal."""
        if self.num_nodes > 1:
            self._start_exchange(with_snapshot=False)
            self.averaging.merge()
        self.is_in_sync = True

    def _adapt_cycle(self) -> None:
        """Exchange more often if the loss has stopped improving. All ranks see the same mean loss, so they agree."""
        if not self.is_cycling:
            return
        with self.comm.ledger.purpose("sync"):
            loss = float(self.comm.mean(self.loss_sum / self.batch if self.sees_losses else self.loss_sum * torch.nan))
        if math.isnan(loss):  # some rank was not told
            return
        self.plateau = self.plateau.after(loss, self.stability)
        if self.plateau.is_stable:
            self.cycle = self.cycle.after_plateau(self.max_global_skips)
            self.node_ranks_differ = self.node_ranks_differ or (self.cycle.local_every > 1 and not self.own_loop)

    def representatives(self) -> list[int]:
        """The rank of the largest node with the same place in its node."""
        largest = max(self.nodes, key=len)
        places = {rank: place for node in self.nodes for place, rank in enumerate(node)}
        return [largest[places[rank]] for rank in range(self.comm.size)]

    # ---- results and states

    def consolidate(self) -> nn.Module:
        """The mean of the parameters of all ranks. An exchange in flight is not merged before."""
        if self.batch and not self.epoch:
            say(
                f"daso has done {self.batch} batches and is still in its first epoch; call trainer.end_epoch() after "
                "each epoch, or loop over tw.epoch",
                self.comm.rank,
                once=True,
            )
        return averaged_copy(self.model, self.comm, self.averaging.names if not self.is_in_sync else [])

    def optimizer_state(self) -> dict[str, OptimizerState]:
        """The mean of the momenta of all ranks."""
        return averaged_state(self.model, self.learner.optimizer, self.comm)

    def state_dict(self) -> dict[str, Any]:
        inside = {} if self.own_loop else {"learner": self.learner.state_dict(), "local_reducer": self.exchange.states}
        return inside | {
            "averaging": self.averaging.state_dict(), "plateau": asdict(self.plateau), "loss_sum": self.loss_sum,
            "cycle": asdict(self.cycle), "counts": {name: getattr(self, name) for name in COUNTS},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaging.load_state_dict(state["averaging"])
        if not self.own_loop:
            self.learner.load_state_dict(state["learner"])
            self.exchange.states = load_states(self.exchange.states, state["local_reducer"])
        self.cycle = Cycle(**state["cycle"])
        self.plateau = Plateau(**state["plateau"])
        self.loss_sum = state["loss_sum"]
        for name in COUNTS:
            setattr(self, name, state["counts"][name])


COUNTS = (  # in a saved state
    "epoch", "batch", "batches_in_flight", "rail", "sees_losses", "is_in_sync", "node_ranks_differ",
)  # fmt: skip
