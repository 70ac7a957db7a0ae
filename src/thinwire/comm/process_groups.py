"""torch process groups: how they are made, how long their ranks wait, and what their errors mean."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from thinwire.comm.addresses import gloo_interface
from thinwire.errors import PeerLost

ProcessGroup = dist.ProcessGroup
GroupPair = tuple[dist.ProcessGroup, dist.ProcessGroup]
PEER_GRACE_SECONDS = 3.0


def new_group_pair(
    ranks: list[int] | None, backend: str, timeout: datetime.timedelta | None, members_only: bool = False
) -> GroupPair:
    """Two process groups of the same ranks (default: all). Every rank calls it, or the members only."""
    about: Any = {"timeout": timeout, "backend": backend, "use_local_synchronization": members_only}
    group = dist.new_group(ranks, **about)
    return group, dist.new_group(ranks, **about)


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long the ranks of a group wait for each other; None (torch's default) if its backend does not say (MPI)."""
    try:
        timeout: datetime.timedelta = group._get_backend(group._device_types[0]).options._timeout
    except RuntimeError:
        return None
    return timeout


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turn torch's connection errors into PeerLost, after a few seconds in which the launcher sees the first cause."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("onnection", "peer", "imed out", "gloo")):
            raise
        time.sleep(PEER_GRACE_SECONDS)
        raise PeerLost(f"lost contact with another rank ({str(error).splitlines()[0]})") from error


@contextmanager
def own_group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    if dist.is_initialized():
        group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
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
