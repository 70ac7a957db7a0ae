"""Gradients exchanged on one communication thread while the backward pass goes on.

DDP tells when gradients are ready; what travels together is fixed by us. DDP regroups its buckets after the
first step, and again after a resume, so anything that depended on them (the order of a ring's sums, a block of
elements that shares a scale) would differ between a resumed run and one that was never stopped. Parcels do not
change, so it does not.
"""

# No `from __future__ import annotations` here: DDP inspects the annotations of its hook.
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels
from thinwire.comm.background import record_event
from thinwire.comm.base import Comm
from thinwire.comm.process import GradBucket, ProcessComm
from thinwire.comm.wire_bytes import all_reduce_sends
from thinwire.common.dtypes import refuse_sparse
from thinwire.common.messages import say
from thinwire.errors import RunError, UsageError
from thinwire.reducers.base import Named, Reduced, Reducer, State, on_reals

FIRST_BUCKET_BYTES = 2**20  # small, so that the wire is busy early in the backward pass
DDP_BUCKET_MB = 25  # DDP's own size; only when it is left alone does its first bucket stay small too


class Exchange(Protocol):
    """Averages a model's gradients over ranks."""

    states: list[State]  # one per bucket
    error: BaseException | None  # of the communication thread; the backward pass only says that something failed

    @property
    def forward(self) -> Callable[..., Any]:
        """To be called instead of the model."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Inside, gradients add up locally and nothing is sent."""

    def finish(self) -> None:
        """To be called after the backward pass; then every gradient is the mean over ranks."""


class NoExchange:
    """Sends nothing: every rank goes by its own gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = model
        self.states: list[State] = []
        self.error: BaseException | None = None

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        pass


def exchange(
    model: nn.Module, reducer: Reducer, comm: Comm, bucket_mb: float = 25.0, unused_parameters: bool = False
) -> Exchange:
    """The exchange for a comm: overlapped with the backward pass on processes, after it on threads."""
    if isinstance(comm, ProcessComm):
        return Overlapped(_wrapped(model, comm, bucket_mb, unused_parameters), reducer, comm, bucket_mb)
    return AfterBackward(model, reducer, comm, bucket_mb, unused_parameters)


def _wrapped(model: nn.Module, comm: ProcessComm, bucket_mb: float, unused_parameters: bool) -> DistributedDataParallel:
    """Weights are made equal and buffers averaged by the strategy, where it is booked: this DDP does neither."""
    ddp = DistributedDataParallel(
        model, process_group=comm.side_group, init_sync=False, gradient_as_bucket_view=True,
        bucket_cap_mb=None if bucket_mb >= DDP_BUCKET_MB else bucket_mb, find_unused_parameters=unused_parameters,
    )  # fmt: skip
    ddp.broadcast_buffers = False
    return ddp


def buckets(parameters: dict[str, nn.Parameter], bucket_mb: float) -> list[list[str]]:
    """Trainable parameters in the order their gradients come (last layer first), in buckets of about one size."""
    groups: list[list[str]] = []
    room = 0.0
    for name, parameter in reversed([(n, p) for n, p in parameters.items() if p.requires_grad]):
        if room <= 0:
            room = bucket_mb * 2**20 if groups else min(FIRST_BUCKET_BYTES, bucket_mb * 2**20)
            groups.append([])
        groups[-1].append(name)
        room -= parameter.numel() * parameter.element_size()
    return groups


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
        self.buckets = buckets(self.parameters, bucket_mb)
        self.states = [self.reducer.init({n: self.parameters[n] for n in names}) for names in self.buckets]
        self.unused_parameters = unused_parameters

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        used = self._used()
        for i, names in enumerate(self.buckets):
            gradients = {n: self._gradient(n) for n in names}
            reduced = self.reducer.reduce(gradients, self.states[i], self.comm)
            self.states[i] = reduced.state
            for name in names:
                wanted = name in used or bool(reduced.mean[name].any())  # or: sent late, by error feedback
                self.parameters[name].grad = reduced.mean[name] if wanted else None

    def _used(self) -> set[str]:
        """Parameters that got a gradient on some rank; the others keep none, as without ranks."""
        names = [name for bucket in self.buckets for name in bucket]
        here = [self.parameters[name].grad is not None for name in names]
        if not self.unused_parameters and not all(here):
            raise no_gradient()
        anywhere = (
            self.comm.max(torch.tensor(here, dtype=torch.int32)) if self.unused_parameters else torch.tensor(here)
        )
        return {name for name, used in zip(names, anywhere.tolist(), strict=True) if used}

    def _gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        refuse_sparse(parameter.grad, name)
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def no_gradient() -> UsageError:
    """The error for a parameter that was left out of a step."""
    return UsageError(
        "some parameters got no gradient in the last step, and the other ranks wait for it. Use all of them in "
        "each step, set requires_grad=False, or allow it, as data_parallel(unused_parameters=True) does"
    )


class _DDPBucket(NamedTuple):
    """A DDP bucket that waits for its buckets."""

    buffer: Tensor
    names: frozenset[str]
    future: Future[Tensor]


class Overlapped:
    """Reduces each bucket on the comm's own thread as soon as DDP has handed over all its gradients.

    DDP hands buckets over in the same order on every rank, so buckets are complete, and travel, in the same
    order on every rank.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        reducer: Reducer,
        comm: ProcessComm,
        bucket_mb: float,
        scale: Callable[[], float] | None = None,  # what gradients are multiplied by; reducers see them without
        in_own_loop: bool = False,  # nobody calls `finish`, or looks at `error`
    ) -> None:
        self.comm = comm
        self.reducer = on_reals(reducer)
        self.forward = ddp
        self.scale = scale
        self.in_own_loop = in_own_loop
        self._held: dict[int, State] = {}  # until it is known whether a loss scaler will skip the step
        self._finite = True
        trained = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}
        self.parameters = {n: p for n, p in trained.items() if n not in ddp.parameters_to_ignore}
        self.names = {id(p): n for n, p in self.parameters.items()}
        self.buckets = buckets(self.parameters, bucket_mb)
        self.states = [self.reducer.init({n: self.parameters[n] for n in names}) for names in self.buckets]
        self.error: BaseException | None = None
        self._num_handed = 0
        self._handed = 0.0  # when the last gradients were
        self._gpu_wait: tuple[torch.cuda.Event, torch.cuda.Event, float] | None = None  # of the last step
        self._ready: torch.cuda.Event | None = None
        self._arrived: Named = {}
        self._reduced: set[str] = set()
        self._waiting: list[_DDPBucket] = []
        self._late: Named = {}
        ddp.register_comm_hook(weakref.ref(self), _hook)  # DDP keeps it for ever, so it must not keep us

    def accumulating(self) -> AbstractContextManager[Any]:
        no_sync: AbstractContextManager[Any] = self.forward.no_sync()
        return no_sync

    def finish(self) -> None:
        """DDP waited for every bucket, if it got every gradient; book the map of used parameters that it sent."""
        self._note_waiting()
        num_handed, self._num_handed = self._num_handed, 0
        if num_handed != len(self.names):
            raise no_gradient()
        if self.forward.find_unused_parameters:
            payload = 4 * len(self.names)
            self.comm.book("all_reduce", payload, all_reduce_sends(payload, self.comm.size, self.comm.rank))
            self._apply_late()

    def _apply_late(self) -> None:
        """DDP gives no gradient to a parameter that no rank used; but error feedback may have sent an earlier one."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None and self._late[name].any():
                parameter.grad = self._late[name]
        self._late.clear()

    def hand_over(self, bucket: GradBucket) -> Future[Tensor]:
        """Give a bucket that is ready to the communication thread."""
        if self.comm.closed:
            raise RunError("gradients cannot be exchanged: the exchange, or the world it belongs to, was closed")
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        ready = record_event(buffer.device)
        self._ready, self._handed = ready, time.perf_counter()
        gradients = {self.names[id(parameter)]: gradient for parameter, gradient in _gradients(bucket)}
        self._num_handed += len(gradients)
        waiting = _DDPBucket(buffer, frozenset(gradients), future)
        self.comm.thread.submit(lambda: self._arrive(waiting, gradients, ready))
        return future

    def _note_waiting(self) -> None:
        """From the last gradient to the end of the backward pass, there was nothing to do but wait for operations.

        A GPU keeps that time itself, and tells it one step later, when it is sure to be over.
        """
        end, timeline = time.perf_counter(), self.comm.ledger.timeline
        if self._ready is None:
            timeline.add_waiting_for_background(self._handed, end)
            return
        if self._gpu_wait is not None:
            last_gradient, over, operation_seconds = self._gpu_wait
            over.synchronize()
            timeline.add_waiting(end - min(last_gradient.elapsed_time(over) / 1e3, operation_seconds), end)
        now = record_event(next(self.forward.parameters()).device)
        assert now is not None
        self._gpu_wait = self._ready, now, timeline.operation_seconds

    def _arrive(self, bucket: _DDPBucket, gradients: Named, ready: torch.cuda.Event | None) -> None:
        self._waiting.append(bucket)
        try:
            with self.comm.thread.stream(bucket.buffer.device, ready):
                self._arrived |= gradients
                for i, names in enumerate(self.buckets):
                    if all(name in self._arrived for name in names):
                        self._reduce(i, {name: self._arrived.pop(name) for name in names})
                self._release()
        except BaseException as error:
            self.error = error
            if self.in_own_loop:  # DDP will only tell that something could not be cast to a tensor
                say(f"exchanging gradients failed: {type(error).__name__}: {error}")
            for waiting in self._waiting:
                waiting.future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
            self._waiting.clear()

    def _reduce(self, bucket: int, gradients: Named) -> None:
        scale = 1.0 if self.scale is None else self.scale()
        given = gradients if scale == 1.0 else {name: g / scale for name, g in gradients.items()}
        reduced = self.reducer.reduce(given, self.states[bucket], self.comm)
        self._keep(bucket, reduced)
        means = [reduced.mean[name] for name in gradients]
        if scale != 1.0:
            torch._foreach_mul_(means, scale)
        torch._foreach_copy_(list(gradients.values()), means)  # one kernel
        if self.forward.find_unused_parameters and not self.in_own_loop:
            self._late |= reduced.mean
        self._reduced |= gradients.keys()

    def _keep(self, bucket: int, reduced: Reduced) -> None:
        """With a loss scaler, a step in which any result is not finite is skipped: then all states stay as before."""
        if self.scale is None:
            self.states[bucket] = reduced.state
            return
        self._held[bucket] = reduced.state
        self._finite = self._finite and all(bool(kernels.all_finite(t)) for t in reduced.mean.values())
        if len(self._held) == len(self.buckets):
            if self._finite:
                self.states = [self._held[i] for i in range(len(self.buckets))]
            self._held, self._finite = {}, True

    def _release(self) -> None:
        """Tell DDP of every bucket whose gradients are all reduced."""
        for bucket in [b for b in self._waiting if b.names <= self._reduced]:
            self._waiting.remove(bucket)
            self._reduced -= bucket.names
            bucket.future.set_result(bucket.buffer)


def _gradients(bucket: GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """A bucket's parameters, and their gradients where they lie in its buffer.

    As DDP lays them out, and not as its `gradients` gives them: that reads complex ones, which lie there as pairs, from
    half of their place, and the elements of dense tensors that are not contiguous in another order.
    """
    flat, parameters = bucket.buffer(), bucket.parameters()
    if parameters[0].is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    for part, parameter in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True):
        shape, stride = parameter.shape, parameter.stride()
        strided = not parameter.is_contiguous() and torch.empty_like(parameter, device="meta").stride() == stride
        yield parameter, part.as_strided(shape, stride) if strided else part.view(shape)


def _hook(exchange: "weakref.ref[Overlapped]", bucket: GradBucket) -> Future[Tensor]:
    overlapped = exchange()
    assert overlapped is not None, "DDP outlived its exchange"
    return overlapped.hand_over(bucket)
