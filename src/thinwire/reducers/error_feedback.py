"""What one step loses is sent in the next."""

from __future__ import annotations

import torch

from thinwire import kernels
from thinwire.comm.base import Comm
from thinwire.errors import UsageError
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState
from thinwire.reducers.states import add_prefix, select_prefix


def error_feedback(
    inner: Reducer,  # the reducer whose errors are kept
) -> Reducer:
    """Keep what another reducer loses in a step, and add it to the next gradient.

    eᵢ ← gᵢ + eᵢ; out = inner(e); eᵢ ← eᵢ − (what the others saw of it). The sum of all results differs from the sum
    of all gradients only by the last residuals. `inner` rounds to the nearest here, not at random. Wire bytes are
    those of `inner`. A step whose result is not finite changes nothing: whoever skips it (a loss scaler) goes on with
    the residuals from before.

    Wire: as `inner`.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    >>> import thinwire, torch
    >>> from thinwire.reducers.topk import topk
    >>> def train(comm):
    ...     reducer, grads = error_feedback(topk(ratio=0.5)), {"w": torch.tensor([3.0, 2.0])}
    ...     state = reducer.init(grads)
    ...     for _ in range(2):
    ...         out = reducer.reduce(grads, state, comm)
    ...         state = out.state
    ...     return out.mean["w"].tolist()
    >>> thinwire.simulate(train, ranks=1)
    [[0.0, 4.0]]
    """
    if inner.keeps_errors:
        raise UsageError(
            "error_feedback: inner keeps what it loses itself, as powersgd does; feedback around it would count that "
            "twice; use it alone"
        )
    return _with_feedback(inner.contracting or inner)


def _with_feedback(inner: Reducer) -> Reducer:

    def init(tensors: Named) -> ReducerState:
        residuals = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in tensors.items()}
        return {**add_prefix(residuals, "residual"), **add_prefix(inner.init(tensors), "inner")}

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        residual = select_prefix(state, "residual")
        corrected = {name: t.detach().float() + residual[name] for name, t in tensors.items()}  # gᵢ + eᵢ
        out = inner.reduce(corrected, select_prefix(state, "inner"), comm)
        mean = {name: out.mean[name].to(t.dtype) for name, t in tensors.items()}
        if not _all_finite(mean):
            return Reduced(mean, lambda: corrected, state)
        error = out.error()  # the next eᵢ
        for name, t in tensors.items():
            if t.dtype != torch.float32:  # what was lost in giving the result its type
                error[name] += out.mean[name] - mean[name].float()
        new_state = {**add_prefix(error, "residual"), **add_prefix(out.state, "inner")}
        return Reduced(mean, lambda: {name: error[name] - residual[name] for name in tensors}, new_state)

    return Reducer(init, reduce, keeps_errors=True)


def _all_finite(tensors: Named) -> bool:
    return bool(torch.stack([kernels.all_finite(t) for t in tensors.values()]).all())
