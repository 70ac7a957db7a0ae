"""States of reducers: nested in each other, saved and loaded, carried over to other buckets."""

from __future__ import annotations

from collections.abc import Collection

import torch

from thinwire.errors import RunError
from thinwire.reducers.base import ReducerState


def add_prefix(state: ReducerState, prefix: str) -> ReducerState:
    """The state of an inner reducer as a part of the outer one's.

    >>> list(add_prefix({"step": torch.tensor(1)}, "inner"))
    ['inner/step']
    """
    return {f"{prefix}/{key}": t for key, t in state.items()}


def select_prefix(state: ReducerState, prefix: str) -> ReducerState:
    """The state of an inner reducer again.

    >>> list(select_prefix({"inner/step": torch.tensor(1), "step": torch.tensor(2)}, "inner"))
    ['step']
    """
    return {key.removeprefix(f"{prefix}/"): t for key, t in state.items() if key.startswith(f"{prefix}/")}


def carry_over(states: list[ReducerState], before: list[ReducerState]) -> list[ReducerState]:
    """New states of other buckets with what still applies of earlier ones: counts of steps, and residuals of parameters
    that are the same.

    The rest may differ between ranks that have not communicated, and starts anew.
    """
    known = {
        key: value for state in before for key, value in state.items() if "residual/" in key or key.endswith("step")
    }
    return [
        {key: known[key] if key in known and known[key].shape == value.shape else value for key, value in state.items()}
        for state in states
    ]


def without_residuals(states: list[ReducerState], parameters: Collection[str]) -> list[ReducerState]:
    """States without the residuals of some parameters, which were replaced."""
    return [
        {key: value for key, value in state.items() if key.rpartition("residual/")[2] not in parameters}
        for state in states
    ]


def load_states(states: list[ReducerState], saved: list[ReducerState]) -> list[ReducerState]:
    """Saved states on the devices of the present ones; refused unless they have the same tensors."""
    if [_outline(s) for s in saved] != [_outline(s) for s in states]:
        missing = [key for now, then in zip(states, saved, strict=False) for key in now if key not in then]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"it lacks {missing[0]}{more}" if missing else "its tensors are others, or have other shapes"
        raise RunError(
            f"the saved state of the reducer does not fit ({what}), and without it the result would be another; "
            "use one of the same model, reducer and bucket_mb, or begin anew"
        )
    return [{key: then[key].to(now[key].device) for key in now} for now, then in zip(states, saved, strict=True)]


def _outline(state: ReducerState) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (t.shape, t.dtype) for key, t in state.items()}
