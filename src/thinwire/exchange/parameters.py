"""Parameters averaged over ranks now and then, at once or in the background.

Three vectors hold all parameters, flattened:

    agreed   what all ranks held in common last
    sent     this rank's parameters x when the exchange in flight was started: a private copy, so x may go on
    moved    agreed − sent, how far this rank has moved; after the exchange, the mean of that over ranks

What travels is `moved`, which any reducer can average:

    start   sent ← x;  moved ← reduce(agreed − sent)
    merge   agreed ← agreed − outer(moved);  x ← agreed + (x − sent)

What was learned since the start is in x − sent, and kept. Where ranks form nodes, one rank of each node, its leader,
exchanges with the leaders of the others, and broadcasts the result inside its node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.comm.background import BackgroundWork
from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.dtypes import is_averaged
from thinwire.common.tensors import flatten, named_persistent_buffers, unflatten
from thinwire.errors import RunError
from thinwire.exchange.fragments import Fragment, make_fragments
from thinwire.reducers.base import Named, Reducer
from thinwire.reducers.states import load_states

Merge = Callable[[Tensor, Tensor, Tensor], Any]  # (x, sent, agreed): changes x


class Outer(NamedTuple):
    """The step that the agreed parameters take: SGD with Nesterov momentum on the mean movement."""

    lr: float = 1.0
    momentum: float = 0.0


class InFlight(NamedTuple):
    """An exchange of one fragment that was started and not yet merged."""

    fragment: int
    work: BackgroundWork[None] | None  # None if its result is there


class ParameterAverager:
    """A model's parameters, averaged over a group in fragments, of which one at a time is in flight.

    Persistent buffers of floating-point numbers (BatchNorm's statistics) go with the last fragment, exactly and
    without outer step. Optimizers are left alone: momentum is each rank's own.
    """

    def __init__(
        self, model: nn.Module, reducer: Reducer, comm: Comm, fragments: int = 1, outer: Outer = Outer(),
        node: Comm | None = None, weight: float = 1.0,
    ) -> None:  # fmt: skip
        self.comm = comm  # all ranks or, with nodes, the leaders
        self.node = node  # the ranks of this node
        self.reducer = reducer
        self.outer = outer
        self.weight = weight  # of this rank, or node, in the mean; 1 on average
        self.model = model
        self.fragments = make_fragments(model, fragments)
        self.agreed = _flat_copy([p for fragment in self.fragments for p in fragment.x])
        self.sent, self.moved = torch.empty_like(self.agreed), torch.zeros_like(self.agreed)
        self._sent_views = [unflatten(self.sent[fragment.place], fragment.x) for fragment in self.fragments]
        self._moved_views = [unflatten(self.moved[fragment.place], fragment.x) for fragment in self.fragments]
        self.buffers_sent: list[Tensor] = []  # if the fragment in flight is the last one
        self.buffers_mean: list[Tensor] = []
        self.momentum = torch.zeros_like(self.agreed) if outer.momentum else self.agreed[:0]
        self.states = [reducer.init(self._named_movements(number)) for number in range(fragments)]
        self.in_flight: InFlight | None = None

    @property
    def names(self) -> list[str]:
        """Of all parameters that are averaged."""
        return [name for fragment in self.fragments for name in fragment.names]

    @torch.no_grad()
    def start(self, number: int = 0, leader: int = 0, average_node: bool = False, in_background: bool = True) -> None:
        """Copy a fragment as it is now and exchange it, in the background or at once.

        `leader` is the rank of the node that exchanges with other nodes: its own parameters, or with `average_node`
        the mean of the node's ranks, for when they differ.
        """
        assert self.in_flight is None, "one fragment at a time"
        torch._foreach_copy_(self._sent_views[number], self.fragments[number].x)
        is_last = number == len(self.fragments) - 1
        self.buffers_sent = [b.clone() for b in averaged_buffers(self.model)] if is_last else []
        self.buffers_mean = [b.clone() for b in self.buffers_sent]
        work = None
        if in_background:
            group = self.node or self.comm
            work = group.in_background(lambda: self._exchange(number, leader, average_node), self.sent.device)
        else:
            self._exchange(number, leader, average_node)
        self.in_flight = InFlight(number, work)

    @torch.no_grad()
    def merge(self, merge: Merge | None = None) -> None:
        """Wait for the exchange in flight; move the agreed parameters, and this rank's with them."""
        number = self._wait_for_result()
        fragment = self.fragments[number]
        self._step(fragment)
        now = self._moved_views[number]  # `moved` is not needed any more: its memory holds x meanwhile
        torch._foreach_copy_(now, fragment.x)
        place = fragment.place
        (merge or keep_progress)(self.moved[place], self.sent[place], self.agreed[place])
        torch._foreach_copy_(fragment.x, now)
        buffers = averaged_buffers(self.model) if self.buffers_mean else []
        for buffer, sent, mean in zip(buffers, self.buffers_sent, self.buffers_mean, strict=True):
            buffer.copy_(torch.where(buffer == sent, mean, mean + (buffer - sent)))  # so infinite ones stay
        self.in_flight = None

    def state_dict(self) -> dict[str, Any]:
        """Everything, once the exchange in flight has its result. It is not merged: that would change the run."""
        in_flight = None if self.in_flight is None else self._wait_for_result()
        place = slice(0) if in_flight is None else self.fragments[in_flight].place
        return {
            "agreed": self.agreed, "momentum": self.momentum, "reducer": self.states, "in_flight": in_flight,
            "sent": self.sent[place], "moved": self.moved[place],
            "buffers_sent": self.buffers_sent, "buffers_mean": self.buffers_mean,
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        if self.in_flight is not None:
            self._wait_for_result()
        if any(state[name].shape != getattr(self, name).shape for name in ("agreed", "momentum")):
            raise RunError("the saved state is of another model, or of other outer options; use the same ones")
        self.states = load_states(self.states, state["reducer"])
        self.agreed.copy_(state["agreed"])
        self.momentum.copy_(state["momentum"])
        self.in_flight = None if state["in_flight"] is None else InFlight(state["in_flight"], None)
        if self.in_flight is not None:
            place = self.fragments[self.in_flight.fragment].place
            self.sent[place], self.moved[place] = state["sent"], state["moved"]
            for name in ("buffers_sent", "buffers_mean"):
                setattr(self, name, [b.to(self.agreed.device, copy=True) for b in state[name]])

    def _wait_for_result(self) -> int:
        """Wait for the exchange in flight; returns the number of its fragment."""
        assert self.in_flight is not None, "no exchange was started"
        if self.in_flight.work is not None:
            self.in_flight.work.wait()
        return self.in_flight.fragment

    @torch.no_grad()
    def _exchange(self, number: int, leader: int, average_node: bool) -> None:
        place = self.fragments[number].place
        moved = torch.sub(self.agreed[place], self.sent[place], out=self.moved[place])
        if self.node is None:
            self._reduce(number)
            return
        node = self.node
        coalesced([*self.buffers_mean, *([moved] if average_node else [])], node.mean)
        if node.rank == leader:
            self._reduce(number)
        coalesced([*self.buffers_mean, moved], lambda flat: node.broadcast(flat, leader))

    def _reduce(self, number: int) -> None:
        """Parameters by the reducer, buffers exactly."""
        given = self._named_movements(number)
        if self.weight != 1:
            torch._foreach_mul_([*given.values(), *self.buffers_mean], self.weight)
        reduced = self.reducer.reduce(given, self.states[number], self.comm)
        self.states[number] = reduced.state
        torch._foreach_copy_(list(given.values()), [reduced.mean[name] for name in given])
        coalesced(self.buffers_mean, self.comm.mean)

    def _step(self, fragment: Fragment) -> None:
        """m ← μ·m + moved; agreed ← agreed − ν·(moved + μ·m)."""
        lr, decay = self.outer
        moved = self.moved[fragment.place]
        agreed = self.agreed[fragment.place].add_(moved, alpha=-lr)
        if decay:
            momentum = self.momentum[fragment.place].mul_(decay).add_(moved)
            agreed.add_(momentum, alpha=-lr * decay)

    def _named_movements(self, number: int) -> Named:
        """Views of a fragment's movement, by parameter."""
        return dict(zip(self.fragments[number].names, self._moved_views[number], strict=True))


def keep_progress(x: Tensor, sent: Tensor, agreed: Tensor) -> None:
    """x ← agreed + (x − sent): what was learned while the exchange was in flight is kept whole.

    Where nothing was, x is exactly what all ranks agreed on.
    """
    x.sub_(sent).add_(agreed)


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Persistent buffers of floating-point or complex numbers; others are counters."""
    return [b for b in named_persistent_buffers(model).values() if is_averaged(b)]


def _flat_copy(tensors: list[Tensor]) -> Tensor:
    """A copy in float32 or, if any is, float64."""
    return flatten(tensors, torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32)
