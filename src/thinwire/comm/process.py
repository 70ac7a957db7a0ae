"""Ranks as processes: a Comm over torch process groups."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket as GradBucket

from thinwire.comm import pairwise
from thinwire.comm.background import BackgroundWork, CommThread, record_event
from thinwire.comm.base import Comm, Op, find_own_group
from thinwire.comm.ledger import Ledger
from thinwire.comm.peers import check_peers
from thinwire.comm.process_groups import (
    GroupPair,
    backend_of,
    destroy,
    members_group_pair,
    new_group_pair,
    peer_errors,
    timeout_of,
)  # fmt: skip
from thinwire.comm.process_work import TorchWork
from thinwire.comm.secret import Secret
from thinwire.comm.watch import Watch
from thinwire.comm.watched import WatchedComm
from thinwire.comm.work import MappedWork, Work
from thinwire.common.tensors import as_vector, from_bytes, num_bytes, to_bytes
from thinwire.errors import RunError, UsageError

T = TypeVar("T")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
RING_BYTES = 2**16  # of one rank's tensor; gloo's own all_gather has less to do for a smaller one
GLOO_REDUCES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
}  # fmt: skip


class ProcessComm(WatchedComm):
    """A torch process group that books what it sends. Get one from `thinwire.join()`.

    `side_group` has the same ranks. It is the second lane, or is for DDP, if that sends messages of its own while the
    communication thread sends ours. On one group their order would differ between ranks.
    """

    is_async = True

    def __init__(
        self, groups: GroupPair, members: Sequence[int], link: str, ledger: Ledger, device: torch.device,
        nodes: Sequence[int], secret: Secret | None = None, watch: Watch | None = None, name: str = "world",
    ) -> None:  # fmt: skip
        self.group, self.side_group = groups
        self.secret = secret  # that the ranks of groups which are split off must know
        self.members = tuple(members)  # their ranks in the world
        self.nodes = tuple(nodes)
        self.rank = self.group.rank()
        self.size = self.group.size()
        self.link = link
        self.backend = backend_of(self.group)
        self.ledger = ledger
        self.wire_device = torch.device("cpu") if self.backend == "gloo" else device
        self.watch, self.name = watch, name  # the name is the same on all ranks of the group, and differs from others
        self.thread = CommThread(f"thinwire-{link}", ledger)
        self._subgroups: list[ProcessComm] = []
        self._num_splits = 0
        self._second_lane: ProcessComm | None = None

    def split(self, groups: Sequence[Sequence[int]], link: str) -> ProcessComm:
        own = find_own_group(groups, self.rank, self.size)
        self.meet("split")  # a rank that is gone is missed here; what follows waits for all that are to come
        pair = self._split_groups(groups, own)
        check_peers(pair, self.secret)
        members, nodes = [self.members[r] for r in own], [self.nodes[r] for r in own]
        about = self.ledger, self.wire_device, nodes, self.secret, self.watch, f"{self.name}/{self._num_splits}"
        self._subgroups.append(ProcessComm(pair, members, link, *about))
        return self._subgroups[-1]

    def _split_groups(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> GroupPair:
        """The whole world makes groups that torch knows, because pipelines need them; a part of it makes its own."""
        self._num_splits += 1
        timeout = timeout_of(self.group)
        if self.group is dist.group.WORLD:
            pairs = [new_group_pair(list(group), self.backend, timeout) for group in groups]
            return next(pair for pair, group in zip(pairs, groups, strict=True) if self.rank in group)
        name, place = f"{self._num_splits}.{own[0]}", (own.index(self.rank), len(own))
        return members_group_pair(self.group.get_group_store(), name, place, self.backend, timeout)

    @property
    def lanes(self) -> Sequence[ProcessComm]:
        """This group, and for gloo the side group, each with a communication thread.

        nccl operations of two groups may wait for each other, in another order on each GPU.
        """
        if self.backend == "nccl":
            return [self]
        if self._second_lane is None:
            groups = self.side_group, self.group
            self._second_lane = ProcessComm(
                groups,
                self.members,
                self.link,
                self.ledger,
                self.wire_device,
                self.nodes,
                None,
                self.watch,
                f"{self.name}+",
            )
        return [self, self._second_lane]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return "group" not in self.__dict__

    def __getattr__(self, name: str) -> Any:
        if name in ("group", "side_group"):
            raise RunError("ranks cannot communicate: the world was closed; train inside of `with thinwire.join()`")
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    def close(self) -> None:
        """End the communication thread, this group and the groups split from it.

        gloo's threads end once nothing refers to their group. They must end before the interpreter does: one that
        frees its last tensor while the interpreter ends aborts the process.
        """
        if self.closed:
            return
        atexit.unregister(self.close)
        if self.watch is not None and "/" not in self.name:  # else it is the watch of a larger group
            self.watch.close()
        self.thread.close()
        if self._second_lane is not None:
            self._second_lane.thread.close()
            del self._second_lane.group, self._second_lane.side_group
        self.close_subgroups()
        groups = [self.side_group] if self.group is dist.group.WORLD else [self.side_group, self.group]
        del self.group, self.side_group
        while groups:
            group = groups.pop(0)
            destroy(group)
            del group

    @property
    def subgroups(self) -> list[Comm]:
        return list(self._subgroups)

    def close_subgroups(self, groups: Sequence[Comm] | None = None) -> None:
        for group in reversed([one for one in self._subgroups if groups is None or one in groups]):
            self._subgroups.remove(group)
            group.close()

    def in_background(self, work: Callable[[], T], device: torch.device) -> BackgroundWork[T]:
        assert self.group  # raises if it was closed
        ready = record_event(device)
        background: BackgroundWork[T] = BackgroundWork(self.ledger)

        def run_when_ready() -> T:
            with self.thread.stream(device, ready):
                result = work()
                if ready is not None:
                    torch.cuda.current_stream(device).synchronize()
                return result

        self.thread.submit(lambda: background.run(run_when_ready))
        return background

    def _stage(self, tensor: Tensor) -> Tensor:
        given = tensor.detach()
        if given.device == self.wire_device:
            return given
        if not given.is_cuda or self.wire_device.type != "cpu":
            return given.contiguous().to(self.wire_device)
        staged = torch.empty(given.shape, dtype=given.dtype, pin_memory=True).copy_(given, non_blocking=True)
        torch.cuda.current_stream(given.device).synchronize()  # one wait, for the GPU's computation and for the copy
        return staged

    def _stage_parts(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        data = self._stage(as_vector([to_bytes(part) for part in parts], torch.uint8))
        return list(data.split([num_bytes(part) for part in parts]))

    def _start_reduce(self, tensor: Tensor, op: Op, device: torch.device, overwrite: bool = False) -> Work:
        if self.backend == "gloo" and tensor.dtype not in GLOO_REDUCES:
            raise UsageError(f"gloo cannot reduce {tensor.dtype}; possible: {sorted(map(str, GLOO_REDUCES))}")
        own = tensor if overwrite and tensor.is_contiguous() else self._own(tensor, device)
        if not own.numel():
            return TorchWork(None, own, device)
        with peer_errors():
            return TorchWork(dist.all_reduce(own, OPS[op], self.group, async_op=True), own, device)

    def _all_gather(self, tensor: Tensor, device: torch.device) -> list[Tensor]:
        sent = to_bytes(tensor)
        out = self._buffer(self.size * sent.numel(), device)
        gather = pairwise.all_gather if self.backend == "gloo" and sent.numel() >= RING_BYTES else dist.all_gather
        if sent.numel():
            with peer_errors():
                gather(list(out.view(self.size, -1).unbind()), sent, self.group)
        return _parts(out, [tensor] * self.size, device)

    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        sizes = [num_bytes(part) for part in like]
        out = self._buffer(sum(sizes), like[0].device)
        with peer_errors():
            if self.backend == "gloo":
                pairwise.all_to_all(out.split(sizes), parts, self.group)
            else:
                sent = as_vector(parts, torch.uint8)
                dist.all_to_all_single(out, sent, sizes, [len(part) for part in parts], self.group)
        return _parts(out, like, like[0].device)

    def _broadcast(self, tensor: Tensor, root: int, device: torch.device) -> Tensor:
        sent = to_bytes(self._own(tensor, device))
        if sent.numel():
            with peer_errors():  # not group=…: for its log of errors torch looks that up, and may not know it
                dist.broadcast(sent, None, self.group, False, root)
        return from_bytes(sent, tensor.dtype, tensor.shape).to(device)

    def _isend(self, tensor: Tensor, to: int, device: torch.device) -> Work:
        sent = to_bytes(self._own(tensor, device))
        with peer_errors():
            return TorchWork(dist.isend(sent, group=self.group, group_dst=to), sent, self.wire_device, self.group)

    def _irecv(self, like: Tensor, source: int) -> Work:
        out = self._buffer(num_bytes(like), like.device)
        with peer_errors():
            work = TorchWork(dist.irecv(out, group=self.group, group_src=source), out, like.device, self.group)
        return MappedWork(work, lambda data: from_bytes(data, like.dtype, like.shape))

    def _own(self, staged: Tensor, device: torch.device) -> Tensor:
        """A contiguous tensor that may be overwritten: what was staged for a GPU is a copy already."""
        is_copy = device.type != self.wire_device.type
        return staged if is_copy else staged.clone(memory_format=torch.contiguous_format)

    def _buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory that the backend can receive into, for data that then moves to a device."""
        pin = device.type == "cuda" and self.wire_device.type == "cpu"
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.wire_device, pin_memory=pin)


def _parts(data: Tensor, like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Bytes off the wire, moved in one go to a device, as tensors of the wanted shapes and dtypes."""
    chunks = data.to(device, non_blocking=device.type == "cuda").split([num_bytes(part) for part in like])
    return [from_bytes(chunk, part.dtype, part.shape) for chunk, part in zip(chunks, like, strict=True)]
