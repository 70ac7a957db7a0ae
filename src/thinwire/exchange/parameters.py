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

from thinwire.comm.background import BackgroundWork
from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.dtypes import as_reals, is_averaged
from thinwire.errors import RunError, UsageError
from thinwire.reducers.base import Named, Reducer, restored

Merge = Callable[[Tensor, Tensor, Tensor], Any]  # (x, sent, agreed): changes x


class Outer(NamedTuple):
    """The step that the agreed parameters take: SGD with Nesterov momentum on the mean movement."""

    lr: float = 1.0
    momentum: float = 0.0


class Flight(NamedTuple):
    """A fragment on its way."""

    fragment: int
    work: BackgroundWork[None] | None  # none if it has arrived


class Fragment(NamedTuple):
    """Some parameters, and where they are when all lie end to end."""

    parameters: list[nn.Parameter]
    names: list[str]
    place: slice

    @property
    def x(self) -> list[Tensor]:
        """The parameters as they are now, complex ones as pairs of real numbers."""
        return [as_reals(p.detach()) if p.is_complex() else p for p in self.parameters]


class ParameterAverager:
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
        self.model = model
        self.fragments = _fragments(model, fragments)
        self.agreed = _end_to_end([p for fragment in self.fragments for p in fragment.x])
        self.sent, self.moved = torch.empty_like(self.agreed), torch.zeros_like(self.agreed)
        self.parts_sent = [_parts(self.sent[fragment.place], fragment.x) for fragment in self.fragments]
        self.parts_moved = [_parts(self.moved[fragment.place], fragment.x) for fragment in self.fragments]
        self.buffers_sent: list[Tensor] = []  # with the fragment under way, if it is the last one
        self.buffers_mean: list[Tensor] = []
        self.momentum = torch.zeros_like(self.agreed) if outer.momentum else self.agreed[:0]
        self.states = [reducer.init(self._given(number)) for number in range(fragments)]
        self.flight: Flight | None = None

    @property
    def names(self) -> list[str]:
        """Of all parameters that are averaged."""
        return [name for fragment in self.fragments for name in fragment.names]

    @torch.no_grad()
    def start(self, number: int = 0, speaker: int = 0, apart: bool = False, beside: bool = True) -> None:
        """Keep a fragment as it is now, and exchange it: beside what comes next, or at once.

        `speaker` is the rank of the node that does; `apart` says that others may differ, and count too.
        """
        assert self.flight is None, "one fragment at a time"
        torch._foreach_copy_(self.parts_sent[number], self.fragments[number].x)
        last = number == len(self.fragments) - 1
        self.buffers_sent = [b.clone() for b in averaged_buffers(self.model)] if last else []
        self.buffers_mean = [b.clone() for b in self.buffers_sent]
        work = None
        if beside:
            group = self.node or self.comm
            work = group.in_background(lambda: self._exchange(number, speaker, apart), self.sent.device)
        else:
            self._exchange(number, speaker, apart)
        self.flight = Flight(number, work)

    @torch.no_grad()
    def merge(self, merge: Merge | None = None) -> None:
        """Wait for what is under way; move the agreed parameters, and this rank's with them."""
        number = self._arrived()
        fragment = self.fragments[number]
        self._step(fragment)
        now = self.parts_moved[number]  # nobody needs what is in there any more
        torch._foreach_copy_(now, fragment.x)
        place = fragment.place
        (merge or keep_progress)(self.moved[place], self.sent[place], self.agreed[place])
        torch._foreach_copy_(fragment.x, now)
        buffers = averaged_buffers(self.model) if self.buffers_mean else []
        for buffer, sent, mean in zip(buffers, self.buffers_sent, self.buffers_mean, strict=True):
            buffer.copy_(torch.where(buffer == sent, mean, mean + (buffer - sent)))  # so infinite ones stay
        self.flight = None

    def state_dict(self) -> dict[str, Any]:
        """Everything, once what is under way has come; it is merged when its time comes, as if nobody had looked."""
        flight = None if self.flight is None else self._arrived()
        place = slice(0) if flight is None else self.fragments[flight].place
        return {
            "agreed": self.agreed, "momentum": self.momentum, "reducer": self.states, "flight": flight,
            "sent": self.sent[place], "moved": self.moved[place],
            "buffers_sent": self.buffers_sent, "buffers_mean": self.buffers_mean,
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        if self.flight is not None:
            self._arrived()
        if any(state[name].shape != getattr(self, name).shape for name in ("agreed", "momentum")):
            raise RunError("the saved state is of another model, or of other outer options; use the same ones")
        self.states = restored(self.states, state["reducer"])
        self.agreed.copy_(state["agreed"])
        self.momentum.copy_(state["momentum"])
        self.flight = None if state["flight"] is None else Flight(state["flight"], None)
        if self.flight is not None:
            place = self.fragments[self.flight.fragment].place
            self.sent[place], self.moved[place] = state["sent"], state["moved"]
            for name in ("buffers_sent", "buffers_mean"):
                setattr(self, name, [b.to(self.agreed.device, copy=True) for b in state[name]])

    def _arrived(self) -> int:
        """The number of the fragment that is under way, once it has arrived."""
        assert self.flight is not None, "nothing is on its way"
        if self.flight.work is not None:
            self.flight.work.wait()
        return self.flight.fragment

    @torch.no_grad()
    def _exchange(self, number: int, speaker: int, apart: bool) -> None:
        place = self.fragments[number].place
        moved = torch.sub(self.agreed[place], self.sent[place], out=self.moved[place])
        if self.node is None:
            self._reduce(number)
            return
        node = self.node
        coalesced([*self.buffers_mean, *([moved] if apart else [])], node.mean)
        if node.rank == speaker:
            self._reduce(number)
        coalesced([*self.buffers_mean, moved], lambda flat: node.broadcast(flat, speaker))

    def _reduce(self, number: int) -> None:
        """Parameters by the reducer, buffers exactly."""
        given = self._given(number)
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

    def _given(self, number: int) -> Named:
        """A fragment's parameters, as reducers see their movements."""
        return dict(zip(self.fragments[number].names, self.parts_moved[number], strict=True))


def keep_progress(x: Tensor, sent: Tensor, agreed: Tensor) -> None:
    """x ← agreed + (x − sent): what was learned while the exchange was under way is kept whole.

    Where nothing was, x is exactly what all ranks agreed on.
    """
    x.sub_(sent).add_(agreed)


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


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Those that are kept and of floating-point or complex numbers; others are counters."""
    return [b for b in kept_buffers(model) if is_averaged(b)]


def kept_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that are part of the model's state; the others are caches that every rank computes for itself."""
    state = model.state_dict()
    return [b for name, b in model.named_buffers() if name in state]


def _fragments(model: nn.Module, number: int) -> list[Fragment]:
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found, begin = [], 0
    for names in cut(dict(parameters), number):
        fragment = Fragment([parameters[name] for name in names], names, slice(0))
        end = begin + sum(x.numel() for x in fragment.x)
        found.append(fragment._replace(place=slice(begin, end)))
        begin = end
    return found


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """A copy in float32 or, if any is, float64."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.cat([t.detach().reshape(-1).to(dtype) for t in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that lie end to end, in place."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
