"""Parameters averaged over ranks now and then, at once or in the background.

Three vectors hold all parameters, flattened:

    agreed   what all ranks held in common last
    sent     this rank's parameters x when the exchange in flight was started: a private copy, so x may go on
    moved    agreed − sent, how far this rank has moved; after the exchange, the mean of that over ranks

What travels is `moved`, which any reducer can average:

    start   sent ← x;  moved ← reduce(agreed − sent)
    merge   agreed ← agreed − outer(moved);  x ← agreed + (x − sent)

What was learned since the start is in x − sent, and kept. A fragment travels in buckets, which are dealt out to the
lanes of the group. So one bucket is copied and coded while another is on the wire.
Where ranks form nodes, one rank of each node, its leader, exchanges with the leaders of the others, and broadcasts the
result inside its node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.comm.background import BackgroundWork, keep_for_stream
from thinwire.comm.base import Comm
from thinwire.common.tensors import flatten, unflatten
from thinwire.errors import RunError
from thinwire.exchange.fragments import Bucket, make_fragments
from thinwire.exchange.statistics import Statistics, take_statistics
from thinwire.reducers.base import Reducer
from thinwire.reducers.states import load_states

Merge = Callable[[Tensor, Tensor, Tensor], Any]  # (x, sent, agreed): changes x


class Outer(NamedTuple):
    """The step that the agreed parameters take: SGD with Nesterov momentum on the mean movement."""

    lr: float = 1.0
    momentum: float = 0.0


class InFlight(NamedTuple):
    """An exchange of one fragment that was started and not yet merged."""

    fragment: int
    statistics: Statistics | None  # if the fragment is the last one
    has_snapshot: bool = True
    work: Sequence[BackgroundWork[None]] = ()  # of each bucket, and of the statistics; none if the results are there

    def wait(self) -> None:
        """Wait for all results."""
        for work in self.work:
            work.wait()


class ParameterAverager:
    """A model's parameters, averaged over a group in fragments.

    Persistent buffers of floating-point numbers (BatchNorm's statistics) go with the last fragment, exactly and without
    outer step. Optimizers are left alone: momentum is each rank's own.
    """

    def __init__(
        self, model: nn.Module, reducer: Reducer, comm: Comm, fragments: int = 1, outer: Outer = Outer(),
        node: Comm | None = None, weight: float = 1.0,
    ) -> None:  # fmt: skip
        self.lanes = comm.lanes  # of all ranks or, with nodes, of the leaders
        self.node = [] if node is None else node.lanes  # of the ranks of this node
        self.model, self.reducer, self.outer = model, reducer, outer
        self.weight = weight  # of this rank, or node, in the mean; 1 on average
        self.fragments = make_fragments(model, fragments)
        self.buckets = [bucket for fragment in self.fragments for bucket in fragment.buckets]
        self.agreed = _flat_copy([x for bucket in self.buckets for x in bucket.x])
        self.sent, self.moved = torch.empty_like(self.agreed), torch.zeros_like(self.agreed)
        self._views = [
            _Views(*(unflatten(flat[bucket.place], bucket.x) for flat in (self.agreed, self.sent, self.moved)))
            for bucket in self.buckets
        ]
        self.momentum = torch.zeros_like(self.agreed) if outer.momentum else self.agreed[:0]
        self.states = [reducer.init(dict(zip(b.names, self._views[b.number].moved, strict=True))) for b in self.buckets]
        self.in_flight: list[InFlight] = []  # in the order of their starts, one for each fragment at most

    def use_nodes(self, between: Comm, node: Comm, weight: float) -> None:
        """From now on one rank of each node exchanges for all of them."""
        self.lanes, self.node, self.weight = between.lanes, node.lanes, weight

    @property
    def names(self) -> list[str]:
        """Of all parameters that are averaged."""
        return [name for bucket in self.buckets for name in bucket.names]

    @torch.no_grad()
    def start(self, fragment: int = 0, leader: int = 0, average_node: bool = False, with_snapshot: bool = True) -> None:
        """Start to exchange a fragment as it is now. Without a snapshot it must not change until it is merged.

        `leader` is the rank of the node that exchanges with other nodes: its own parameters, or with `average_node`
        the mean of the node's ranks, for when they differ.
        """
        assert all(exchange.fragment != fragment for exchange in self.in_flight), "merge it first"
        is_last = fragment == len(self.fragments) - 1
        statistics = take_statistics(self.model) if is_last else None
        work = []
        for bucket in self.fragments[fragment].buckets:
            views = self._views[bucket.number]
            torch._foreach_copy_(views.sent if with_snapshot else views.moved, bucket.x)
            work.append(self._in_background(bucket.number, self._exchange, bucket, leader, average_node, with_snapshot))
        if statistics is not None and statistics.sent:
            work.append(self._in_background(len(self.buckets), self._exchange_statistics, statistics, leader))
        self.in_flight.append(InFlight(fragment, statistics, with_snapshot, work))

    @torch.no_grad()
    def merge(self, merge: Merge | None = None) -> None:
        """Wait for the oldest exchange in flight; move the agreed parameters, and this rank's with them."""
        exchange = self.in_flight[0]
        buckets = self.fragments[exchange.fragment].buckets
        for i, bucket in enumerate(buckets):
            if exchange.work:
                exchange.work[i].wait()
            self._step(bucket)
            self._move(bucket, merge or keep_progress, exchange.has_snapshot)
        for work in exchange.work[len(buckets) :]:
            work.wait()
        if exchange.statistics is not None:
            exchange.statistics.merge_into(self.model)
        self.in_flight.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """Everything, once the exchange in flight has its result. It is not merged: that would change the run."""
        assert len(self.in_flight) < 2, "a step ends with one exchange in flight"
        state = {"agreed": self.agreed, "momentum": self.momentum, "reducer": self.states, "in_flight": None}
        for exchange in self.in_flight:
            exchange.wait()
            place, statistics = self.fragments[exchange.fragment].place, exchange.statistics
            state |= {
                "in_flight": exchange.fragment, "sent": self.sent[place], "moved": self.moved[place],
                "statistics": None if statistics is None else statistics._asdict(),
            }  # fmt: skip
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for exchange in self.in_flight:
            exchange.wait()
        if any(state[name].shape != getattr(self, name).shape for name in ("agreed", "momentum")):
            raise RunError("the saved state is of another model, or of other outer options; use the same ones")
        self.states = load_states(self.states, state["reducer"])
        self.agreed.copy_(state["agreed"])
        self.momentum.copy_(state["momentum"])
        self.in_flight = []
        if state["in_flight"] is not None:
            place = self.fragments[state["in_flight"]].place
            self.sent[place], self.moved[place] = state["sent"], state["moved"]
            saved = state["statistics"] or {}
            vectors = {key: [v.to(self.agreed.device, copy=True) for v in saved[key]] for key in saved}
            self.in_flight = [InFlight(state["in_flight"], Statistics(**vectors) if vectors else None)]

    # ---- on the threads of lanes

    def _in_background(self, number: int, work: Callable[..., None], *args: Any) -> BackgroundWork[None]:
        """Run work(*args, lane), where the lane follows from the number, so that ranks agree on it."""
        lane = number % len(self.lanes)
        group = self.node[lane] if self.node else self.lanes[lane]
        return group.in_background(lambda: work(*args, lane), self.agreed.device)

    @torch.no_grad()
    def _exchange(self, bucket: Bucket, leader: int, average_node: bool, with_snapshot: bool, lane: int) -> None:
        moved = self.moved[bucket.place]
        torch.sub(self.agreed[bucket.place], self.sent[bucket.place] if with_snapshot else moved, out=moved)
        if not self.node:
            self._reduce(bucket, lane)
            return
        node = self.node[lane]
        if average_node:
            moved.copy_(node.mean(moved))
        if node.rank == leader:
            self._reduce(bucket, lane)
        moved.copy_(node.broadcast(moved, leader))

    def _reduce(self, bucket: Bucket, lane: int) -> None:
        views = self._views[bucket.number].moved
        if self.weight != 1:
            self.moved[bucket.place].mul_(self.weight)
        given = dict(zip(bucket.names, views, strict=True))
        if self.reducer.in_place is not None:
            self.reducer.in_place(given, self.lanes[lane])
            return
        reduced = self.reducer.reduce(given, self.states[bucket.number], self.lanes[lane])
        keep_for_stream(self.states[bucket.number].values())
        self.states[bucket.number] = reduced.state
        torch._foreach_copy_(views, [reduced.mean[name] for name in bucket.names])

    @torch.no_grad()
    def _exchange_statistics(self, statistics: Statistics, leader: int, lane: int) -> None:
        """Exactly, without reducer. Those of a node's ranks always differ."""
        node = self.node[lane] if self.node else None
        for mean in statistics.mean:
            if node is not None:
                mean.copy_(node.mean(mean))
            if node is None or node.rank == leader:
                mean.copy_(self.lanes[lane].mean(mean.mul_(self.weight)))
            if node is not None:
                mean.copy_(node.broadcast(mean, leader))

    # ---- on the computing thread

    def _step(self, bucket: Bucket) -> None:
        """m ← μ·m + moved; agreed ← agreed − ν·(moved + μ·m)."""
        lr, decay = self.outer
        moved = self.moved[bucket.place]
        agreed = self.agreed[bucket.place].add_(moved, alpha=-lr)
        if decay:
            momentum = self.momentum[bucket.place].mul_(decay).add_(moved)
            agreed.add_(momentum, alpha=-lr * decay)

    def _move(self, bucket: Bucket, merge: Merge, has_snapshot: bool) -> None:
        """This rank's parameters, by the rule or, if they are as they were sent, to what all ranks agreed on."""
        x, views, place = bucket.x, self._views[bucket.number], bucket.place
        if not has_snapshot:
            torch._foreach_copy_(x, views.agreed)
            return
        torch._foreach_copy_(views.moved, x)  # `moved` is not needed any more: its memory holds x meanwhile
        merge(self.moved[place], self.sent[place], self.agreed[place])
        torch._foreach_copy_(x, views.moved)


class _Views(NamedTuple):
    """A bucket's parts of the three vectors, in the shapes of its parameters."""

    agreed: list[Tensor]
    sent: list[Tensor]
    moved: list[Tensor]


def keep_progress(x: Tensor, sent: Tensor, agreed: Tensor) -> None:
    """x ← agreed + (x − sent): what was learned while the exchange was in flight is kept whole.

    Where nothing was, x is exactly what all ranks agreed on.
    """
    x.sub_(sent).add_(agreed)


def _flat_copy(tensors: list[Tensor]) -> Tensor:
    """A copy in float32 or, if any is, float64."""
    return flatten(tensors, torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32)
