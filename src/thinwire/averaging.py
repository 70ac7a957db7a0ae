"""Parameters of ranks brought together now and then, at once or while training goes on.

What travels is how far a rank has moved since the ranks last agreed, so any reducer can carry it:

    start   sent ← x;  moved = reduce(agreed − sent), on a thread of its own
    merge   agreed ← agreed − outer(moved);  x ← agreed + (x − sent)

`sent` is a private copy, so x may go on. What was learned since then is in x − sent, and kept. Where ranks form nodes,
one of each node speaks for it, and passes on what it was told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.comm.background import Background
from thinwire.comm.base import Comm
from thinwire.errors import UsageError
from thinwire.reducers.base import Named, Reducer, restored

Merge = Callable[[Tensor, Tensor, Tensor], Any]  # (x, sent, agreed): changes x


class Outer(NamedTuple):
    """The step that the agreed parameters take: SGD with Nesterov momentum on the mean movement."""

    lr: float = 1.0
    momentum: float = 0.0


class Flight(NamedTuple):
    """A fragment on its way."""

    fragment: int
    work: Background[None] | None  # none if it has arrived


class Fragment(NamedTuple):
    """Part of all tensors laid end to end: parameters and, in the last fragment, buffers behind them."""

    x: list[Tensor]
    names: list[str]  # of the parameters
    whole: slice
    parameters: slice
    buffers: slice


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
        self.fragments = _fragments(model, fragments)
        self.agreed = _end_to_end([t for fragment in self.fragments for t in fragment.x])
        self.sent, self.moved = torch.empty_like(self.agreed), torch.zeros_like(self.agreed)
        self.parts_sent = [_parts(self.sent[fragment.whole], fragment.x) for fragment in self.fragments]
        self.parts_moved = [_parts(self.moved[fragment.whole], fragment.x) for fragment in self.fragments]
        self.momentum = torch.zeros_like(self.agreed) if outer.momentum else self.agreed[:0]
        self.states = [reducer.init(self._given(number)) for number in range(fragments)]
        self.flight: Flight | None = None

    @torch.no_grad()
    def start(self, number: int = 0, speaker: int = 0, apart: bool = False, beside: bool = True) -> None:
        """Keep a fragment as it is now, and exchange it: beside what comes next, or at once.

        `speaker` is the rank of the node that does; `apart` says that others may differ, and count too.
        """
        assert self.flight is None, "one fragment at a time"
        torch._foreach_copy_(self.parts_sent[number], self.fragments[number].x)
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
        whole = fragment.whole
        (merge or keep_progress)(self.moved[whole], self.sent[whole], self.agreed[whole])
        torch._foreach_copy_(fragment.x, now)
        self.flight = None

    def meet(self) -> None:
        """All fragments, and wait for them: then x is the same on all ranks."""
        for number in range(len(self.fragments)):
            self.start(number, beside=False)
            self.merge()

    def state_dict(self) -> dict[str, Any]:
        """Everything, once what is under way has come; it is merged when its time comes, as if nobody had looked."""
        flight = None if self.flight is None else self._arrived()
        whole = slice(0) if flight is None else self.fragments[flight].whole
        return {
            "agreed": self.agreed, "momentum": self.momentum, "reducer": self.states, "flight": flight,
            "sent": self.sent[whole], "moved": self.moved[whole],
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        if self.flight is not None:
            self._arrived()
        self.states = restored(self.states, state["reducer"])
        self.agreed.copy_(state["agreed"])
        self.momentum.copy_(state["momentum"])
        self.flight = None if state["flight"] is None else Flight(state["flight"], None)
        if self.flight is not None:
            whole = self.fragments[self.flight.fragment].whole
            self.sent[whole], self.moved[whole] = state["sent"], state["moved"]

    def _arrived(self) -> int:
        """The number of the fragment that is under way, once it has arrived."""
        assert self.flight is not None, "nothing is on its way"
        if self.flight.work is not None:
            self.flight.work.wait()
        return self.flight.fragment

    @torch.no_grad()
    def _exchange(self, number: int, speaker: int, apart: bool) -> None:
        fragment = self.fragments[number]
        moved = self.moved[fragment.whole]
        torch.sub(self.agreed[fragment.whole], self.sent[fragment.whole], out=moved)
        if self.node is None:
            self._reduce(number)
            return
        if apart:
            moved.copy_(self.node.mean(moved))
        if self.node.rank == speaker:
            self._reduce(number)
        moved.copy_(self.node.broadcast(moved, speaker))

    def _reduce(self, number: int) -> None:
        """Parameters by the reducer, buffers exactly; both at the same time."""
        fragment = self.fragments[number]
        self.moved[fragment.whole] *= self.weight
        buffers = self.moved[fragment.buffers]
        exact = self.comm.start_mean(buffers) if buffers.numel() else None
        given = self._given(number)
        reduced = self.reducer.reduce(given, self.states[number], self.comm)
        self.states[number] = reduced.state
        torch._foreach_copy_(list(given.values()), [reduced.mean[name] for name in given])
        if exact is not None:
            buffers.copy_(exact.wait())

    def _step(self, fragment: Fragment) -> None:
        """m ← μ·m + moved; agreed ← agreed − ν·(moved + μ·m). Buffers go all the way."""
        lr, decay = self.outer
        moved = self.moved[fragment.parameters]
        agreed = self.agreed[fragment.parameters].add_(moved, alpha=-lr)
        if decay:
            momentum = self.momentum[fragment.parameters].mul_(decay).add_(moved)
            agreed.add_(momentum, alpha=-lr * decay)
        self.agreed[fragment.buffers] -= self.moved[fragment.buffers]

    def _given(self, number: int) -> Named:
        """A fragment's parameters, as reducers see their movements."""
        return dict(zip(self.fragments[number].names, self.parts_moved[number], strict=False))


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


def _fragments(model: nn.Module, number: int) -> list[Fragment]:
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    state = model.state_dict()  # buffers that are no part of it are caches that every rank computes for itself
    buffers = [b for n, b in model.named_buffers() if n in state and b.is_floating_point()]
    parts, found, begin = cut(parameters, number), [], 0
    for i, names in enumerate(parts):
        mine = [parameters[name] for name in names]
        behind = buffers if i == len(parts) - 1 else []
        middle = begin + sum(t.numel() for t in mine)
        end = middle + sum(t.numel() for t in behind)
        found.append(Fragment([*mine, *behind], names, slice(begin, end), slice(begin, middle), slice(middle, end)))
        begin = end
    return found


def _end_to_end(tensors: list[Tensor]) -> Tensor:
    """A copy in float32 or, if any is, float64."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


def _parts(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The tensors that lie end to end, in place."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
