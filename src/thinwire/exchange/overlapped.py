"""Gradients reduced on communication threads while the backward pass goes on."""

# No `from __future__ import annotations` here: DDP inspects the annotations of its hook.
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels
from thinwire.comm.background import keep_for_stream, record_event
from thinwire.comm.process import GradBucket, ProcessComm
from thinwire.comm.wire_bytes import all_reduce_sends
from thinwire.common.messages import say
from thinwire.errors import RunError
from thinwire.exchange.buckets import ddp_gradients, init_states, make_buckets, missing_gradient_error
from thinwire.exchange.held_states import HeldStates
from thinwire.exchange.waiting import BackwardWaiting
from thinwire.reducers.base import Named, Reducer, on_reals


class _DDPBucket(NamedTuple):
    """A DDP bucket that is not finished: DDP waits for its future, which is set when all its gradients are reduced."""

    buffer: Tensor
    names: frozenset[str]
    future: Future[Tensor]


class Overlapped:
    """Reduces each bucket on a communication thread as soon as DDP has given all its gradients.

    Our buckets are not DDP's: see buckets.py. DDP gives its buckets in the same order on every rank, so ours are
    complete in the same order on every rank. They are dealt out to the lanes of the comm in turn: while one lane codes
    a bucket, the other one sends.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        reducer: Reducer,
        comm: ProcessComm,
        bucket_mb: float,
        scale: Callable[[], float] | None = None,  # what gradients are multiplied by; reducers see them without
        in_own_loop: bool = False,  # the user's: nobody calls `finish`, or looks at `error`
    ) -> None:
        self.comm = comm
        self.reducer = on_reals(reducer)
        self.forward = ddp
        self.scale = scale
        self.in_own_loop = in_own_loop
        trained = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}
        self.parameters = {n: p for n, p in trained.items() if n not in ddp.parameters_to_ignore}
        self.names = {id(p): n for n, p in self.parameters.items()}
        self.buckets = make_buckets(self.parameters, bucket_mb)
        self.states = init_states(self.reducer, self.parameters, self.buckets)
        self.error: BaseException | None = None
        self._held_states = HeldStates(len(self.buckets))
        self._waiting = BackwardWaiting(comm.ledger, next(ddp.parameters()).device)
        ddp_sends = ddp.find_unused_parameters and ddp.process_group is comm.side_group
        self._lanes = [comm] if ddp_sends else comm.lanes
        self._num_given = 0  # gradients that DDP has given in this step
        self._ready: Named = {}  # gradients of our buckets that are not complete
        self._lock = threading.Lock()  # of what the lanes share, which follows
        self._reduced: dict[str, torch.cuda.Event | None] = {}  # gradients of DDP buckets that are not finished
        self._ddp_buckets: list[_DDPBucket] = []
        self._late: Named = {}
        ddp.register_comm_hook(weakref.ref(self), _hook)  # DDP keeps it for ever, so it must not keep us

    def accumulating(self) -> AbstractContextManager[Any]:
        no_sync: AbstractContextManager[Any] = self.forward.no_sync()
        return no_sync

    def finish(self) -> None:
        """Check that DDP gave every gradient: only then it has waited for every bucket."""
        self._waiting.backward_done()
        num_given, self._num_given = self._num_given, 0
        if num_given != len(self.names):
            raise missing_gradient_error()
        if self.forward.find_unused_parameters:
            payload = 4 * len(self.names)  # DDP's own all-reduce: which parameters were used
            self.comm.book("all_reduce", payload, all_reduce_sends(payload, self.comm.size, self.comm.rank))
            self._apply_late_gradients()

    def _apply_late_gradients(self) -> None:
        """DDP gives no gradient to a parameter that no rank used; but error feedback may have sent an earlier one."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None and self._late[name].any():
                parameter.grad = self._late[name]
        self._late.clear()

    # ---- on the computing thread, during the backward pass

    def submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Give a DDP bucket, whose gradients are ready, to the communication thread."""
        if self.comm.closed:
            raise RunError("gradients cannot be exchanged: the exchange, or the world it belongs to, was closed")
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        ready = record_event(buffer.device)
        self._waiting.gradient_ready(ready)
        gradients = {self.names[id(parameter)]: gradient for parameter, gradient in ddp_gradients(bucket)}
        self._num_given += len(gradients)
        with self._lock:
            self._ddp_buckets.append(_DDPBucket(buffer, frozenset(gradients), future))
        self._ready |= gradients
        for i, names in enumerate(self.buckets):
            if all(name in self._ready for name in names):
                self._submit(i, {name: self._ready.pop(name) for name in names}, ready)
        return future

    def _submit(self, bucket: int, gradients: Named, ready: torch.cuda.Event | None) -> None:
        lane = self._lanes[bucket % len(self._lanes)]
        lane.thread.submit(lambda: self._run(lane, bucket, gradients, ready))

    # ---- on the communication threads

    def _run(self, lane: ProcessComm, bucket: int, gradients: Named, ready: torch.cuda.Event | None) -> None:
        """Reduce a bucket, and finish every DDP bucket that this completes."""
        device = next(iter(gradients.values())).device
        try:
            with lane.thread.stream(device, ready):
                self._reduce(lane, bucket, gradients)
                done = record_event(device)
                with self._lock:
                    self._reduced |= dict.fromkeys(gradients, done)
                    self._finish_ddp_buckets(device)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Let the backward pass fail too."""
        self.error = self.error or error
        if self.in_own_loop:  # DDP will only say that something could not be cast to a tensor
            say(f"exchanging gradients failed: {type(error).__name__}: {error}", level=logging.ERROR)
        with self._lock:
            for unfinished in self._ddp_buckets:
                unfinished.future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
            self._ddp_buckets.clear()

    def _reduce(self, lane: ProcessComm, bucket: int, gradients: Named) -> None:
        """Replace the gradients of one bucket by their means, in DDP's buffers."""
        if self.reducer.in_place is not None and self.scale is None:
            self.reducer.in_place(gradients, lane)
            self._keep_late(gradients)
            return
        scale = 1.0 if self.scale is None else self.scale()
        given = gradients if scale == 1.0 else {name: g / scale for name, g in gradients.items()}
        reduced = self.reducer.reduce(given, self.states[bucket], lane)
        keep_for_stream(self.states[bucket].values())
        if self.scale is None:
            self.states[bucket] = reduced.state
        else:
            is_finite = bool(kernels.all_finite_in(list(reduced.mean.values())))  # waits for a GPU, so without the lock
            with self._lock:
                self.states = self._held_states.hold(bucket, reduced.state, is_finite, self.states)
        means = [reduced.mean[name] for name in gradients]
        if scale != 1.0:
            torch._foreach_mul_(means, scale)
        torch._foreach_copy_(list(gradients.values()), means)  # one kernel
        self._keep_late(reduced.mean)

    def _keep_late(self, means: Named) -> None:
        """Keep what DDP might not give to its parameter."""
        if self.forward.find_unused_parameters and not self.in_own_loop:
            with self._lock:
                self._late |= means

    def _finish_ddp_buckets(self, device: torch.device) -> None:
        """Set the future of each DDP bucket whose gradients are reduced, on this lane or another."""
        complete = [bucket for bucket in self._ddp_buckets if bucket.names <= self._reduced.keys()]
        self._ddp_buckets = [bucket for bucket in self._ddp_buckets if not bucket.names <= self._reduced.keys()]
        for bucket in complete:
            for event in {self._reduced.pop(name) for name in bucket.names} - {None}:
                assert event is not None
                torch.cuda.current_stream(device).wait_event(event)
            bucket.future.set_result(bucket.buffer)


def _hook(exchange: "weakref.ref[Overlapped]", bucket: GradBucket) -> Future[Tensor]:
    overlapped = exchange()
    assert overlapped is not None, "DDP outlived its exchange"
    return overlapped.submit(bucket)
