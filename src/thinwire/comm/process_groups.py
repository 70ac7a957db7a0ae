"""torch process groups: how they are made, how long their ranks wait, and what their errors mean."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.comm.addresses import gloo_interface
from thinwire.errors import PeerLost

ProcessGroup = dist.ProcessGroup
GroupPair = tuple[dist.ProcessGroup, dist.ProcessGroup]
PEER_GRACE_SECONDS = 3.0
MADE_BY_MEMBERS = "thinwire"  # the description of groups that torch does not know


def new_group_pair(ranks: list[int], backend: str, timeout: datetime.timedelta | None) -> GroupPair:
    """Two of torch's process groups of the same ranks of the world. Every rank of the world calls it."""
    about: Any = {"timeout": timeout, "backend": backend}
    with meeting():
        pair = new_group(ranks, **about), new_group(ranks, **about)
    return _connected(pair) if dist.get_rank() in ranks else pair


def _connected(pair: GroupPair) -> GroupPair:
    """The pair, once all its ranks have connected: one that closed its groups before would break them for others."""
    with meeting():
        meet(pair[1])
    return pair


def new_group(ranks: list[int] | None = None, **options: Any) -> ProcessGroup:
    """A process group of torch that this rank is in, or torch's mark for one that it is not in."""
    return cast(ProcessGroup, dist.new_group(ranks, **options))


def members_group_pair(
    store: dist.Store, name: str, place: tuple[int, int], backend: str, timeout: datetime.timedelta | None
) -> GroupPair:
    """Two process groups that their members alone make; `place` is this rank in them, and their size.

    In one store each name may be used once. torch does not know these groups: the names that it gives to other groups
    depend on how many it knows, and these are on some ranks only. DDP can use them; its pipelines cannot.
    """
    with meeting():
        first, second = (
            _members_group(dist.PrefixStore(f"{name}/{i}", store), name, place, backend, timeout) for i in "01"
        )
    return _connected((first, second))


def _members_group(
    store: dist.Store, name: str, place: tuple[int, int], backend: str, timeout: datetime.timedelta | None
) -> dist.ProcessGroup:
    wait = timeout or dist.default_pg_timeout
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        made: Any = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), *place, options)
        kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
    else:
        made = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), *place, timeout=wait)
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
    group: Any = dist.ProcessGroup(store, *place)
    group._set_default_backend(kind)
    group._register_backend(device, kind, made)
    group._set_group_name(name)
    group._set_group_desc(MADE_BY_MEMBERS)
    return cast(dist.ProcessGroup, group)


def backend_of(group: dist.ProcessGroup) -> str:
    """nccl or gloo; gloo too for a group that has several."""
    name = group.name() if group.group_desc == MADE_BY_MEMBERS else dist.get_backend(group)
    return "nccl" if name == "nccl" else "gloo"


def destroy(group: dist.ProcessGroup) -> None:
    """End a group. Its threads end once nothing refers to it."""
    if group.group_desc == MADE_BY_MEMBERS:
        group.shutdown()
    elif dist.is_initialized():  # else torch has destroyed its groups already
        with suppress(ValueError):  # so it has, with an earlier world
            dist.destroy_process_group(group)


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long the ranks of a group wait for each other; None (torch's default) if its backend does not say (MPI)."""
    try:
        timeout: datetime.timedelta = group._get_backend(group._device_types[0]).options._timeout
    except RuntimeError:
        return None
    return timeout


def lengthen_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let the ranks of a group wait for each other at least so long, from their next operation on."""
    before = timeout_of(group)
    if before is not None and before.total_seconds() < seconds:
        group._get_backend(group._device_types[0])._set_default_timeout(datetime.timedelta(seconds=seconds))


def wait_for_message(work: Any, group: dist.ProcessGroup) -> None:
    """Wait for a message between two ranks: for these gloo knows only the timeout that a group was made with."""
    timeout = timeout_of(group) if backend_of(group) == "gloo" else None
    work.wait() if timeout is None else work.wait(timeout)


def meet(group: ProcessGroup) -> None:
    """Return once every rank of a gloo group is here; PeerLost if one is gone. It is in no ledger."""
    if backend_of(group) == "gloo":
        with peer_errors():
            group.barrier().wait()


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turn torch's connection errors into PeerLost."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("onnection", "peer", "imed out", "timeout after", "gloo")):
            raise
        raise PeerLost(f"lost contact with another rank ({str(error).splitlines()[0]})") from error


def give_grace() -> None:
    """Wait for a few seconds after another rank was lost, in which the launcher sees the first cause."""
    time.sleep(PEER_GRACE_SECONDS)


@contextmanager
def meeting() -> Iterator[None]:
    """Inside, ranks make groups or meet in them, and no watch is there yet; a rank that is gone is a PeerLost."""
    try:
        with peer_errors():
            yield
    except PeerLost:
        give_grace()
        raise


@contextmanager
def without_grace() -> Iterator[None]:
    """Inside, a rank that lost another says so at once: no launcher waits to see the first cause."""
    global PEER_GRACE_SECONDS
    before, PEER_GRACE_SECONDS = PEER_GRACE_SECONDS, 0.0
    try:
        yield
    finally:
        PEER_GRACE_SECONDS = before


@contextmanager
def own_group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    if dist.is_initialized():
        group = new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
        return
    with gloo_interface("127.0.0.1"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
