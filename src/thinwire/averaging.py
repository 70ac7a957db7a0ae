"""Parameters of ranks brought together now and then, at once or while training goes on.

What travels is how far a rank has moved since the ranks last agreed, so any reducer can carry it:

    start   sent ← x;  moved = reduce(agreed − sent), on a thread of its own
    merge   agreed ← agreed − outer(moved);  x ← agreed + (x − sent)

`sent` is a private copy, so x may go on. What was learned since then is in x − sent, and kept. Where ranks form nodes,
one of each node speaks for it, and passes on what it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.comm.background import Background
from thinwire.comm.base import Comm, in_one_go
from thinwire.errors import UsageError
from thinwire.reducers.base import Named, Reducer, restored

Tensors = list[Tensor]
Merge = Callable[[Tensors, Tensors, Tensors], None]  # (x, sent, agreed): changes x


class Flight(NamedTuple):
    """A fragment on its way."""

    fragment: int
    work: Background[None] | None  # none after a resume: it has arrived


class Outer(NamedTuple):
    """The step that the agreed parameters take: SGD with Nesterov momentum on the mean movement."""

    lr: float = 1.0
    momentum: float = 0.0


class Averaging:
    """A model's parameters, averaged over a group in fragments of which one at a time is on its way.

    Buffers that are floating-point and part of the model's state (BatchNorm's statistics) go with the last fragment,
    exactly and without outer step. Optimizers are left alone: momentum is each rank's own.
    """

    def __init__(
        self, model: nn.Module, reducer: Reducer, comm: Comm, fragments: int = 1, outer: Outer = Outer(),
        node: Comm | None = None, weight: float = 1.0,
    ) -> None:  # fmt: skip
        self.comm = comm  # those that speak to each other
        self.node = node  # those that one of them speaks for
        self.reducer = reducer
        self.outer = outer
        self.weight = weight  # of this rank, or node, in the mean; 1 on average
        self.parameters: Named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.fragments = cut(self.parameters, fragments)
        self.buffers = {f"buffer {name}": buffer for name, buffer in averaged_buffers(model).items()}
        self.x = {**self.parameters, **self.buffers}
        self.agreed = {name: t.detach().clone() for name, t in self.x.items()}
        self.sent = {name: torch.empty_like(t) for name, t in self.agreed.items()}
        self.moved = {name: torch.zeros_like(t) for name, t in self.agreed.items()}
        self.momentum = {n: torch.zeros_like(self.agreed[n]) for n in self.parameters} if outer.momentum else {}
        self.states = [reducer.init({n: self.agreed[n] for n in names}) for names in self.fragments]
        self.flight: Flight | None = None

    @torch.no_grad()
    def start(self, fragment: int = 0, speaker: int = 0, apart: bool = False) -> None:
        """Keep a fragment as it is now, and begin to exchange it.

        `speaker` is the rank of the node that does; `apart` says that others may have other parameters.
        """
        assert self.flight is None, "one fragment at a time"
        names = self._names(fragment)
        torch._foreach_copy_(_of(self.sent, names), _of(self.x, names))
        group, device = self.node or self.comm, self.sent[names[0]].device
        work = group.in_background(lambda: self._exchange(fragment, speaker, apart), device)
        self.flight = Flight(fragment, work)

    @torch.no_grad()
    def merge(self, merge: Merge | None = None) -> None:
        """Wait for what is under way; move the agreed parameters, and this rank's with them."""
        names = self._names(self._arrived())
        agreed = _of(self.agreed, names)
        torch._foreach_sub_(agreed, self._steps(names))
        (merge or keep_progress)(_of(self.x, names), _of(self.sent, names), agreed)
        self.flight = None

    def meet(self) -> None:
        """All fragments, and wait for them: then x is the same on all ranks."""
        for fragment in range(len(self.fragments)):
            self.start(fragment)
            self.merge()

    def state_dict(self) -> dict[str, Any]:
        """Everything, once what is under way has come; it is merged when its time comes, as if nobody had looked."""
        state: dict[str, Any] = {
            "agreed": self.agreed,
            "momentum": self.momentum,
            "states": self.states,
            "fragment": None,
        }
        if self.flight is not None:
            fragment = self._arrived()
            names = self._names(fragment)
            state |= {"fragment": fragment, **{k: {n: getattr(self, k)[n] for n in names} for k in ("moved", "sent")}}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        if self.flight is not None:
            self._arrived()
        self.states = restored(self.states, state["states"])
        self.flight = None if state["fragment"] is None else Flight(state["fragment"], None)
        for name in ("agreed", "momentum", *(("moved", "sent") if self.flight else ())):
            for key, tensor in state[name].items():
                getattr(self, name)[key].copy_(tensor)

    def _arrived(self) -> int:
        """The fragment that is under way, once it has arrived."""
        assert self.flight is not None, "nothing is on its way"
        if self.flight.work is not None:
            self.flight.work.wait()
        return self.flight.fragment

    @torch.no_grad()
    def _exchange(self, fragment: int, speaker: int, apart: bool) -> None:
        names = self._names(fragment)
        moved = _of(self.moved, names)
        torch._foreach_copy_(moved, torch._foreach_sub(_of(self.agreed, names), _of(self.sent, names)))
        if self.node is not None:
            in_one_go([self.moved[n] for n in names if apart or n in self.buffers], self.node.mean)
        if self.node is None or self.node.rank == speaker:
            self._reduce(fragment, moved)
        if self.node is not None:
            node = self.node
            in_one_go(moved, lambda flat: node.broadcast(flat, speaker))

    def _reduce(self, fragment: int, moved: Tensors) -> None:
        if self.weight != 1:
            torch._foreach_mul_(moved, self.weight)
        given = {n: self.moved[n] for n in self._names(fragment)}
        parameters = {n: t for n, t in given.items() if n in self.parameters}
        reduced = self.reducer.reduce(parameters, self.states[fragment], self.comm)
        self.states[fragment] = reduced.state
        torch._foreach_copy_(list(parameters.values()), _of(reduced.mean, list(parameters)))
        in_one_go([t for n, t in given.items() if n in self.buffers], self.comm.mean)

    def _steps(self, names: Sequence[str]) -> Tensors:
        """outer(moved): lr·(moved + μ·m) with m ← μ·m + moved."""
        lr, decay = self.outer
        steps = []
        for name in names:
            moved = self.moved[name]
            if name in self.momentum:
                momentum = self.momentum[name].mul_(decay).add_(moved)
                moved = moved + decay * momentum
            steps.append(moved if name in self.buffers or lr == 1 else lr * moved)
        return steps

    def _names(self, fragment: int) -> list[str]:
        last = fragment == len(self.fragments) - 1
        return [*self.fragments[fragment], *(self.buffers if last else ())]


def keep_progress(x: Tensors, sent: Tensors, agreed: Tensors) -> None:
    """x ← agreed + (x − sent): what was learned while the exchange was under way is kept whole.

    Where nothing was, x is exactly what all ranks agreed on.
    """
    torch._foreach_sub_(x, sent)
    torch._foreach_add_(x, agreed)


def cut(parameters: Named, fragments: int) -> list[list[str]]:
    """Parameters in order, in fragments of about equal size.

    >>> cut({"a": torch.zeros(3), "b": torch.zeros(1), "c": torch.zeros(4)}, 2)
    [['a', 'b'], ['c']]
    """
    if fragments > len(parameters):
        raise UsageError(f"fragments={fragments}, but the model has {len(parameters)} parameter tensors to share out")
    parts: list[list[str]] = [[]]
    total, done = sum(t.numel() for t in parameters.values()), 0
    for i, (name, t) in enumerate(parameters.items()):
        full = done + t.numel() / 2 > total * len(parts) / fragments
        needed = len(parameters) - i <= fragments - len(parts)
        if parts[-1] and len(parts) < fragments and (full or needed):
            parts.append([])
        parts[-1].append(name)
        done += t.numel()
    return parts


def averaged_buffers(model: nn.Module) -> Named:
    """The buffers that ranks average: floating-point ones that are part of the model's state.

    Others are caches that every rank computes for itself, or counters.
    """
    state = model.state_dict()
    return {name: b for name, b in model.named_buffers() if name in state and b.is_floating_point()}


def _of(tensors: Named, names: Sequence[str]) -> Tensors:
    return [tensors[name].detach() for name in names]
