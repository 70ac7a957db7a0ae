"""How a strategy averages gradients over ranks: not at all, after the backward pass, or during it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.base import Comm
from thinwire.comm.process import ProcessComm
from thinwire.comm.recording import RecordingComm
from thinwire.common.dtypes import refuse_sparse
from thinwire.exchange.buckets import init_states, make_buckets, missing_gradient_error
from thinwire.exchange.overlapped import Overlapped
from thinwire.exchange.recorded import RecordedOverlap
from thinwire.reducers.base import Reducer, ReducerState, on_reals

DDP_BUCKET_MB = 25  # DDP's own size; only when it is left alone does its first bucket stay small too


class GradientExchange(Protocol):
    """Averages a model's gradients over ranks."""

    states: list[ReducerState]  # one per bucket
    error: BaseException | None  # of the communication thread; the backward pass only says that something failed

    @property
    def forward(self) -> Callable[..., Any]:
        """Call this instead of the model."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Inside, gradients add up locally and nothing is sent."""

    def finish(self) -> None:
        """Call this after the backward pass; then every gradient is the mean over ranks."""


class NoExchange:
    """Sends nothing: every rank uses its own gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = model
        self.states: list[ReducerState] = []
        self.error: BaseException | None = None

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        pass


class OneRank(NoExchange):
    """One rank with an exact reducer, which would copy gradients and change nothing. States and errors are as ever."""

    def __init__(self, model: nn.Module, reducer: Reducer, bucket_mb: float, unused_parameters: bool) -> None:
        super().__init__(model)
        parameters = dict(model.named_parameters())
        self.states = init_states(on_reals(reducer), parameters, make_buckets(parameters, bucket_mb))
        self.required = [] if unused_parameters else [p for p in parameters.values() if p.requires_grad]

    def finish(self) -> None:
        if any(p.grad is None for p in self.required):
            raise missing_gradient_error()


def make_exchange(
    model: nn.Module, reducer: Reducer, comm: Comm, bucket_mb: float = 25.0, unused_parameters: bool = False
) -> GradientExchange:
    """The exchange for a comm: overlapped with the backward pass on processes, after it on threads.

    One rank exchanges nothing, unless the reducer would change its gradients.
    """
    if comm.size == 1 and reducer.in_place is not None:
        return OneRank(model, reducer, bucket_mb, unused_parameters)
    if isinstance(comm, RecordingComm):
        return RecordedOverlap(model, reducer, comm, bucket_mb, unused_parameters)
    if isinstance(comm, ProcessComm):
        return Overlapped(_wrap_in_ddp(model, comm, bucket_mb, unused_parameters), reducer, comm, bucket_mb)
    return AfterBackward(model, reducer, comm, bucket_mb, unused_parameters)


def _wrap_in_ddp(
    model: nn.Module, comm: ProcessComm, bucket_mb: float, unused_parameters: bool
) -> DistributedDataParallel:
    """A DDP that neither makes weights equal nor averages buffers: the strategy does both, and books them."""
    ddp = DistributedDataParallel(
        model, process_group=comm.side_group, init_sync=False, gradient_as_bucket_view=True,
        bucket_cap_mb=None if bucket_mb >= DDP_BUCKET_MB else bucket_mb, find_unused_parameters=unused_parameters,
    )  # fmt: skip
    ddp.broadcast_buffers = False
    return ddp


class AfterBackward:
    """Reduces all buckets after the backward pass."""

    def __init__(
        self, model: nn.Module, reducer: Reducer, comm: Comm, bucket_mb: float, unused_parameters: bool
    ) -> None:
        self.forward = model
        self.error: BaseException | None = None
        self.comm = comm
        self.reducer = on_reals(reducer)
        self.parameters = dict(model.named_parameters())
        self.buckets = make_buckets(self.parameters, bucket_mb)
        self.states = init_states(self.reducer, self.parameters, self.buckets)
        self.unused_parameters = unused_parameters

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        used = self._used_anywhere()
        for i, names in enumerate(self.buckets):
            gradients = {n: self._gradient(n) for n in names}
            reduced = self.reducer.reduce(gradients, self.states[i], self.comm)
            self.states[i] = reduced.state
            for name in names:
                wanted = name in used or bool(reduced.mean[name].any())  # or: sent late, by error feedback
                self.parameters[name].grad = reduced.mean[name] if wanted else None

    def _used_anywhere(self) -> set[str]:
        """Parameters that got a gradient on some rank; the others keep none, as without ranks."""
        names = [name for bucket in self.buckets for name in bucket]
        here = [self.parameters[name].grad is not None for name in names]
        if not self.unused_parameters and not all(here):
            raise missing_gradient_error()
        anywhere = (
            self.comm.max(torch.tensor(here, dtype=torch.int32)) if self.unused_parameters else torch.tensor(here)
        )
        return {name for name, used in zip(names, anywhere.tolist(), strict=True) if used}

    def _gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        refuse_sparse(parameter.grad, name)
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
