"""Reducer: the mean of named tensors over ranks, exact or approximate."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from thinwire import kernels
from thinwire.comm.base import Comm
from thinwire.common.dtypes import as_reals
from thinwire.data import derive_seed
from thinwire.errors import RunError

Named = dict[str, Tensor]  # by parameter name
Block = Annotated[int, Field(ge=8, multiple_of=8)]  # elements that share a scale
State = dict[str, Tensor]  # plain tensors, so that checkpoints need nothing special; the same names for ever


class Reduced(NamedTuple):
    """What one reduction gives."""

    mean: Named  # bitwise the same on every rank
    error: Callable[[], Named]  # float32: what this rank gave, less what the others saw of it; to be called at once
    state: State


class Reducer(NamedTuple):
    """A pair of functions: `init` makes the state for some tensors, `reduce` averages them.

    `reduce` never changes its inputs, and copies what it wants to keep of them: they are overwritten as soon as it
    returns. It is written as if communication were instant; running it beside the backward pass is the business of
    `thinwire.exchange.gradients`. The mean over ranks of (given − error) is the mean that it returns.
    """

    init: Callable[[Named], State]
    reduce: Callable[[Named, State, Comm], Reduced]
    keeps_errors: bool = False  # and adds them to what is given next, so nothing around it must do that too
    contracting: Reducer | None = None  # the same for use under error feedback, if that is another: see below


def contracting(reducer: Reducer) -> Reducer:
    """A reducer for use under error feedback: one whose error is smaller than what it was given.

    Without feedback a mean that is right on average matters, even if single results are far off. With feedback that
    would let errors grow from step to step: numbers are rounded to the nearest there, and nothing is magnified.
    """
    return reducer.contracting or reducer


def on_reals(reducer: Reducer) -> Reducer:
    """A reducer that takes complex tensors too: the one given sees each as pairs of real numbers."""

    def as_given(out: Named, tensors: Named) -> Named:
        return {n: torch.view_as_complex(t.clone()) if tensors[n].is_complex() else t for n, t in out.items()}

    def init(tensors: Named) -> State:
        return reducer.init({name: as_reals(t.detach()) for name, t in tensors.items()})

    def reduce(tensors: Named, state: State, comm: Comm) -> Reduced:
        out = reducer.reduce({name: as_reals(t.detach()) for name, t in tensors.items()}, state, comm)
        return out._replace(mean=as_given(out.mean, tensors), error=lambda: as_given(out.error(), tensors))

    under_feedback = on_reals(reducer.contracting) if reducer.contracting else None
    return Reducer(init, reduce, reducer.keeps_errors, under_feedback)


class Averaged(NamedTuple):
    """What averaging one vector gives."""

    mean: Tensor
    error: Callable[[], Tensor]
    state: State | None = None


class Draw(NamedTuple):
    """Where random numbers come from: differs from step to step and between buckets, and is the same on every rank."""

    number: int
    unbiased: bool = True

    def key(self, *who: int) -> int:
        """32 bits for one use: of a rank, or of all ranks when none is given."""
        return derive_seed(self.number, *who) & 0xFFFFFFFF

    def rounding(self, *who: int) -> int | None:
        """The key for rounding at random, or None for rounding to the nearest."""
        return self.key(*who) if self.unbiased else None


def on_vectors(
    average: Callable[[Tensor, Draw, State, Comm], Averaged], init: Callable[[Tensor], State] = lambda x: {}
) -> Reducer:
    """A reducer from a function of one vector: all tensors end to end, in float32.

    The only state of most is how many steps there were, because random numbers depend on it.
    """
    return _on_vectors(average, init, unbiased=True)._replace(contracting=_on_vectors(average, init, unbiased=False))


def _on_vectors(
    average: Callable[[Tensor, Draw, State, Comm], Averaged], init: Callable[[Tensor], State], unbiased: bool
) -> Reducer:

    def init_all(tensors: Named) -> State:
        kernels.check_choice()
        return {"step": torch.zeros((), dtype=torch.int64), **init(flatten(tensors))}

    def reduce(tensors: Named, state: State, comm: Comm) -> Reduced:
        x = flatten(tensors)
        if not x.numel():
            return Reduced({name: t.detach().clone() for name, t in tensors.items()}, nothing_lost(tensors), state)
        step = int(state["step"])
        draw = Draw(derive_seed(zlib.crc32("\n".join(tensors).encode()), step), unbiased)
        out = average(x, draw, state, comm)
        return Reduced(
            unflatten(out.mean, tensors),
            lambda: unflatten(out.error(), tensors, torch.float32),
            {"step": torch.tensor(step + 1), **(out.state or {})},
        )

    return Reducer(init_all, reduce)


def flatten(tensors: Named) -> Tensor:
    """All tensors end to end, in float32."""
    return torch.cat([t.detach().reshape(-1).float() for t in tensors.values()])


def unflatten(flat: Tensor, like: Named, dtype: torch.dtype | None = None) -> Named:
    """The tensors that were flattened."""
    parts = flat.split([t.numel() for t in like.values()])
    return {n: part.view(t.shape).to(dtype or t.dtype) for (n, t), part in zip(like.items(), parts, strict=True)}


def in_order(tensors: Named, like: Named) -> Named:
    """The same tensors in another's order."""
    return {name: tensors[name] for name in like}


def nothing_lost(tensors: Named) -> Callable[[], Named]:
    """The error of an exact reducer."""
    return lambda: {name: torch.zeros_like(t, dtype=torch.float32) for name, t in tensors.items()}


def nested(state: State, name: str) -> State:
    """A part's state as one of the whole's: every name behind the part's own.

    >>> list(nested({"step": torch.tensor(1)}, "inner"))
    ['inner/step']
    """
    return {f"{name}/{key}": t for key, t in state.items()}


def part_of(state: State, name: str) -> State:
    """The state of a part again.

    >>> list(part_of({"inner/step": torch.tensor(1), "step": torch.tensor(2)}, "inner"))
    ['step']
    """
    return {key.removeprefix(f"{name}/"): t for key, t in state.items() if key.startswith(f"{name}/")}


def carried(states: list[State], before: list[State]) -> list[State]:
    """New states that go on where others ended: in counters of steps, and residuals of parameters that are the same.

    The rest may differ between ranks that did not talk to each other, and starts anew.
    """
    known = {
        key: value for state in before for key, value in state.items() if "residual/" in key or key.endswith("step")
    }
    return [
        {key: known[key] if key in known and known[key].shape == value.shape else value for key, value in state.items()}
        for state in states
    ]


def restored(states: list[State], saved: list[State]) -> list[State]:
    """Saved states in place of the present ones, on their devices; refused unless nothing is missing or left over."""
    if [_outline(s) for s in saved] != [_outline(s) for s in states]:
        missing = [key for now, then in zip(states, saved, strict=False) for key in now if key not in then]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"it lacks {missing[0]}{more}" if missing else "its tensors are others, or have other shapes"
        raise RunError(
            f"the saved state of the reducer does not fit ({what}), and without it the result would be another; "
            "use one of the same model, reducer and bucket_mb, or begin anew"
        )
    return [{key: then[key].to(now[key].device) for key in now} for now, then in zip(states, saved, strict=True)]


def _outline(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (t.shape, t.dtype) for key, t in state.items()}
