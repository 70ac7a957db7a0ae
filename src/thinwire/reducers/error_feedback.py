"""What one step loses is sent in the next."""

from __future__ import annotations

import torch
from torch import Tensor

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
    the residuals from before. (On a GPU, where nothing waits for the result, counts of steps go on all the same.)

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
        residuals = {name: torch.zeros(t.shape, device=t.device) for name, t in tensors.items()}
        return {**add_prefix(residuals, "residual"), **add_prefix(inner.init(tensors), "inner")}

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        residual = select_prefix(state, "residual")
        total = torch._foreach_add([t.detach().float() for t in tensors.values()], [residual[n] for n in tensors])
        corrected = dict(zip(tensors, total, strict=True))  # gᵢ + eᵢ
        out = inner.reduce(corrected, select_prefix(state, "inner"), comm)
        mean = {name: out.mean[name].to(t.dtype) for name, t in tensors.items()}
        finite = kernels.all_finite_in(list(mean.values()))
        if not finite.is_cuda and not finite:
            return Reduced(mean, lambda: corrected, state)
        error = out.error()  # the next eᵢ
        _add_rounding(error, out.mean, mean)
        new_state = {**add_prefix(error, "residual"), **add_prefix(out.state, "inner")}
        if finite.is_cuda:  # nothing waits for it
            new_state = {key: torch.where(finite, t, state[key]) if t.is_cuda else t for key, t in new_state.items()}
        return Reduced(mean, lambda: _error(corrected, error, residual, finite), new_state)

    return Reducer(init, reduce, keeps_errors=True, has_phases=inner.has_phases)


def _add_rounding(error: Named, exact: Named, rounded: Named) -> None:
    """Add what was lost in giving results their type."""
    names = [name for name, t in rounded.items() if t.dtype != torch.float32]
    if names:
        lost = torch._foreach_sub([exact[name] for name in names], [rounded[name].float() for name in names])
        torch._foreach_add_([error[name] for name in names], lost)


def _error(corrected: Named, error: Named, residual: Named, finite: Tensor) -> Named:
    """What this step lost; all of it if the result is not finite."""
    return {name: torch.where(finite, error[name] - residual[name], corrected[name]) for name in error}
