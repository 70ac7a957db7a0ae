"""The exchange of gradients of a rank that is recorded: as `overlapped`, but without DDP, which needs real groups."""

# No `from __future__ import annotations` here: DDP inspects the annotations of its hook.
import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.background import BackgroundWork
from thinwire.comm.process import GradBucket
from thinwire.comm.process_groups import ProcessGroup
from thinwire.comm.recording import RecordingComm
from thinwire.comm.wire_bytes import all_reduce_sends
from thinwire.exchange.buckets import init_states, make_buckets, missing_gradient_error
from thinwire.reducers.base import Named, Reducer, on_reals


class RecordedOverlap:
    """Gives each bucket to a lane as soon as its last gradient is computed; `finish` waits for all of them."""

    def __init__(
        self, model: nn.Module, reducer: Reducer, comm: RecordingComm, bucket_mb: float, unused_parameters: bool
    ) -> None:
        self.forward: nn.Module = model
        self.reducer, self.comm = on_reals(reducer), comm
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.buckets = make_buckets(self.parameters, bucket_mb)
        self.states = init_states(self.reducer, self.parameters, self.buckets)
        self.error: BaseException | None = None
        self.unused_parameters = unused_parameters
        self._lanes = [comm] if unused_parameters else comm.lanes  # as DDP, which sends in the other one
        self._bucket_of = {name: i for i, names in enumerate(self.buckets) for name in names}
        self._is_accumulating = False
        self._missing = [len(names) for names in self.buckets]
        self._tasks: dict[int, BackgroundWork[None]] = {}
        self._hooks: list[Any] = []
        if comm.turns.group is not None:
            self._use_ddp(model, comm.turns.group)
            return
        own = weakref.ref(self)  # parameters must not keep the exchange alive
        for name, p in self.parameters.items():
            self._hooks.append(p.register_post_accumulate_grad_hook(functools.partial(_ready, own, name)))

    def _use_ddp(self, model: nn.Module, group: ProcessGroup) -> None:
        """Let DDP tell when gradients are ready, as it does in a run: what that costs is timed too."""
        ddp = DistributedDataParallel(
            model, process_group=group, init_sync=False, gradient_as_bucket_view=True,
            find_unused_parameters=self.unused_parameters,
        )  # fmt: skip
        ddp.broadcast_buffers = False
        names, own = {id(p): name for name, p in self.parameters.items()}, weakref.ref(self)

        def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
            exchange = own()
            for p in bucket.parameters():
                if exchange is not None:
                    exchange._ready(names[id(p)], p)
            future: Future[Tensor] = Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, hook)
        self.forward = ddp

    def accumulating(self) -> AbstractContextManager[Any]:
        no_sync: AbstractContextManager[Any]
        if isinstance(self.forward, DistributedDataParallel):
            no_sync = self.forward.no_sync()
            return no_sync
        return self._accumulating()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def _ready(self, name: str, parameter: Tensor) -> None:
        if self._is_accumulating:
            return
        bucket = self._bucket_of[name]
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self._submit(bucket)

    def _submit(self, bucket: int) -> None:
        lane = self._lanes[bucket % len(self._lanes)]
        device = self.parameters[self.buckets[bucket][0]].device
        self._tasks[bucket] = lane.in_background(functools.partial(self._reduce, bucket, lane), device)

    def _reduce(self, bucket: int, lane: RecordingComm) -> None:
        gradients: Named = {}
        for name in self.buckets[bucket]:
            gradient = self.parameters[name].grad
            assert gradient is not None
            gradients[name] = gradient
        if self.reducer.in_place is not None:
            self.reducer.in_place(gradients, lane)
            return
        reduced = self.reducer.reduce(gradients, self.states[bucket], lane)
        self.states[bucket] = reduced.state
        for name, gradient in gradients.items():
            gradient.copy_(reduced.mean[name])

    def finish(self) -> None:
        for p in self.parameters.values():
            if p.grad is None:
                if not self.unused_parameters:
                    raise missing_gradient_error()
                p.grad = p.new_zeros(p.shape)
        for bucket in range(len(self.buckets)):
            if bucket not in self._tasks:
                self._submit(bucket)
        for bucket in range(len(self.buckets)):
            self._tasks[bucket].wait()
        self._tasks.clear()
        self._missing = [len(names) for names in self.buckets]
        if self.unused_parameters:
            payload = 4 * len(self.parameters)  # DDP's own all-reduce: which parameters were used
            self.comm.book("all_reduce", payload, all_reduce_sends(payload, self.comm.size, self.comm.rank))

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        self.close()


def _ready(exchange: "weakref.ref[RecordedOverlap]", name: str, parameter: Tensor) -> None:
    found = exchange()
    if found is not None:
        found._ready(name, parameter)
