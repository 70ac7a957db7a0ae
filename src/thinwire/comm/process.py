"""Ranks as processes: the one file that talks to torch.distributed."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket as GradBucket

from thinwire.comm.base import Comm, Op, Pending
from thinwire.comm.ledger import Ledger
from thinwire.comm.world import World, find_world
from thinwire.errors import PeerLost, RunError, UsageError

T = TypeVar("T")
_Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]

LOOPBACK = ("127.0.0.1", "localhost")
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=0, launcher="none")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
GLOO_SUMS = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
}  # fmt: skip


class ProcessComm(Comm):
    """A torch process group that books what it sends. Get one from `thinwire.join()`.

    `side_group` has the same ranks, for what must not mix with our messages: DDP sends a few of its own while
    the communication thread is at work, and a group's messages must go in the same order on every rank.
    """

    def __init__(self, groups: _Pair, link: str, ledger: Ledger, device: torch.device) -> None:
        self.group, self.side_group = groups
        group = self.group
        self.rank = group.rank()
        self.size = group.size()
        self.link = link
        self.backend = dist.get_backend(group)
        self.ledger = ledger
        self.wire_device = torch.device("cpu") if self.backend == "gloo" else device
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"thinwire-{link}")
        self._parts: list[ProcessComm] = []

    def split(self, groups: Sequence[Sequence[int]], link: str) -> ProcessComm:
        self._group_of_mine(groups)
        ranks = dist.get_process_group_ranks(self.group)
        made = [_new_pair([ranks[r] for r in group], self.backend) for group in groups]  # all ranks make all groups
        mine = next(pair for group, pair in zip(groups, made, strict=True) if self.rank in group)
        part = ProcessComm(mine, link, self.ledger, self.wire_device)
        self._parts.append(part)
        return part

    def close(self) -> None:
        """End the communication threads of this group and of those split from it."""
        for part in self._parts:
            part.close()
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _start_reduce(self, tensor: Tensor, op: Op) -> Pending:
        if self.backend == "gloo" and tensor.dtype not in GLOO_SUMS:
            raise UsageError(f"gloo cannot reduce {tensor.dtype}; possible: {sorted(map(str, GLOO_SUMS))}")
        staged = self._staged(tensor)
        if not staged.numel():
            return _Work(None, staged, tensor.device)
        return self._guard(
            lambda: _Work(dist.all_reduce(staged, OPS[op], self.group, async_op=True), staged, tensor.device)
        )

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        sent = _as_bytes(self._staged(tensor))
        outs = [torch.empty_like(sent) for _ in range(self.size)]
        if sent.numel():
            self._guard(lambda: dist.all_gather(outs, sent, self.group))
        return [_restored(out, tensor) for out in outs]

    def _all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        sent = [_as_bytes(self._staged(part)) for part in parts]
        sizes = [part.numel() * part.element_size() for part in like]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=self.wire_device)
        counts = [part.numel() for part in sent]
        self._guard(lambda: dist.all_to_all_single(out, torch.cat(sent), sizes, counts, self.group))
        return [_restored(chunk, shape) for chunk, shape in zip(out.split(sizes), like, strict=True)]

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        sent = _as_bytes(self._staged(tensor))
        if sent.numel():
            self._guard(lambda: dist.broadcast(sent, group=self.group, group_src=root))
        return _restored(sent, tensor)

    def _send(self, tensor: Tensor, to: int) -> None:
        sent = _as_bytes(self._staged(tensor))
        self._guard(lambda: dist.send(sent, group=self.group, group_dst=to))

    def _recv(self, like: Tensor, source: int) -> Tensor:
        out = torch.empty(like.numel() * like.element_size(), dtype=torch.uint8, device=self.wire_device)
        self._guard(lambda: dist.recv(out, group=self.group, group_src=source))
        return _restored(out, like)

    def _staged(self, tensor: Tensor) -> Tensor:
        """A private contiguous copy where the backend can send it from (gloo: host memory, pinned for a GPU)."""
        pin = tensor.is_cuda and self.wire_device.type == "cpu"
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.wire_device, pin_memory=pin)
        return staged.copy_(tensor.detach())

    def _guard(self, run: Callable[[], T]) -> T:
        return _guarded(run)


def _new_pair(ranks: list[int], backend: str) -> _Pair:
    return dist.new_group(ranks, backend=backend), dist.new_group(ranks, backend=backend)


class _Work:
    """A torch work handle with the tensor that it fills."""

    def __init__(self, work: Any, tensor: Tensor, device: torch.device) -> None:
        self.work = work
        self.tensor = tensor
        self.device = device

    def wait(self) -> Tensor:
        if self.work is not None:
            _guarded(self.work.wait)
        return self.tensor.to(self.device, non_blocking=True)  # pinned, and kept until the copy is done

    def done(self) -> bool:
        return self.work is None or bool(self.work.is_completed())


def _guarded(run: Callable[[], T]) -> T:
    """Turn torch's connection errors into PeerLost, after a moment in which the launcher can see the first cause."""
    try:
        return run()
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("onnection", "peer", "imed out", "gloo")):
            raise
        time.sleep(PEER_GRACE_SECONDS)
        raise PeerLost(f"lost contact with another rank ({str(error).splitlines()[0]})") from error


PEER_GRACE_SECONDS = 3.0


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _restored(data: Tensor, like: Tensor) -> Tensor:
    """Bytes off the wire as a tensor of the wanted shape, dtype and device."""
    if not data.numel():
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    aligned = data if data.storage_offset() % like.element_size() == 0 else data.clone()
    return aligned.view(like.dtype).reshape(like.shape).to(like.device)


@contextmanager
def join(
    backend: str | None = None, timeout_seconds: float = 1800, device: torch.device | str | None = None
) -> Iterator[ProcessComm]:
    """Join the world that torchrun, srun, mpirun or `thinwire train` made; alone, be a world of one.

    A process group that exists already is used as it is and left standing.

    >>> import thinwire, torch
    >>> with thinwire.join() as comm:
    ...     comm.size, comm.mean(torch.ones(2)).tolist()
    (1, [1.0, 1.0])
    """
    world = find_world() or ALONE
    chosen = pick_device(world) if device is None else torch.device(device)
    if dist.is_initialized():
        with closing(_world_comm(chosen)) as comm:
            yield comm
        return
    with _loopback_for_gloo(world):
        _init(world, backend or _pick_backend(world, chosen), timeout_seconds)
        try:
            with closing(_world_comm(chosen)) as comm:
                yield comm
        finally:
            dist.destroy_process_group()


def _world_comm(device: torch.device) -> ProcessComm:
    group = dist.group.WORLD
    assert group is not None
    return ProcessComm((group, dist.new_group(backend=dist.get_backend())), "world", Ledger(), device)


@contextmanager
def _loopback_for_gloo(world: World) -> Iterator[None]:
    """On one machine, have gloo use loopback; left to itself it looks up the host's name and listens there."""
    if world.address not in LOOPBACK or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def pick_device(world: World | None = None) -> torch.device:
    """This rank's GPU where there is one (ranks share GPUs when there are more ranks), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", (world or ALONE).local_rank % torch.cuda.device_count())


def _pick_backend(world: World, device: torch.device) -> str:
    own_gpu = device.type == "cuda" and world.local_size <= torch.cuda.device_count()
    return "nccl" if own_gpu and dist.is_nccl_available() and world.size > 1 else "gloo"


def _init(world: World, backend: str, timeout_seconds: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store: dist.Store = dist.HashStore() if world.size == 1 else _store(world, timeout)
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    except dist.DistError as error:
        raise RunError(f"rank {world.rank} could not join {world.size} ranks: {error}") from error


def _store(world: World, timeout: datetime.timedelta) -> dist.Store:
    """Where the ranks meet: the launcher's store if it has one, else one that rank 0 opens."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = world.rank == 0 and not hosted
    where = f"{world.address}:{world.port}"
    try:
        if master and world.address in LOOPBACK:
            store = loopback_store(world.size, world.port, timeout)
        else:
            store = dist.TCPStore(world.address, world.port, world.size, master, timeout, wait_for_workers=False)
    except (dist.DistError, OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UsageError(f"{where} is in use by another program; set MASTER_PORT to a free port") from None
        raise RunError(f"rank {world.rank} cannot reach {where}: {error}") from error
    return dist.PrefixStore(f"thinwire/{attempt}", store)


def loopback_store(num_ranks: int, port: int = 0, timeout: datetime.timedelta | None = None) -> dist.TCPStore:
    """A store that listens on 127.0.0.1 alone (torch's own listens on every interface)."""
    listener = socket.create_server(("127.0.0.1", port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, num_ranks, True, timeout or datetime.timedelta(seconds=300),
        wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip
