"""A Comm of ranks that the user names by a process group or a device mesh: the whole world, or a part of it."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm import peers
from thinwire.comm.base import Comm
from thinwire.comm.join import default_group, gather_numbers, own_node_key
from thinwire.comm.ledger import Ledger
from thinwire.comm.process import ProcessComm
from thinwire.comm.process_groups import members_group_pair, timeout_of
from thinwire.comm.watch import start_watch
from thinwire.comm.world import number_nodes
from thinwire.errors import RunError, UsageError

UserGroup = dist.ProcessGroup | DeviceMesh | Literal["world"]
COUNTER = "thinwire/groups"  # in the store of the world: how many names were taken
_unused: list[Comm] = []  # whose owners are gone


def process_group(given: Any, caller: str) -> dist.ProcessGroup:
    """The process group that a user means; UsageError if this rank is not in it."""
    if isinstance(given, str) and given == "world":
        return default_group()
    if isinstance(given, DeviceMesh):
        return _group_of_mesh(given, caller)
    if given is None or given == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to ranks that are not in it
        raise _not_a_member(caller)
    if not isinstance(given, dist.ProcessGroup):
        raise UsageError(
            f"{caller}: group={given!r}; possible: a process group (torch.distributed.new_group), a device mesh of one "
            'dimension (mesh["dp"]), or "world"'
        )
    try:
        dist.get_process_group_ranks(given)
    except KeyError:
        raise UsageError(f"{caller}: the group was destroyed, or torch.distributed did not make it; make one") from None
    return given


def _group_of_mesh(mesh: DeviceMesh, caller: str) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise UsageError(
            f"{caller}: group={mesh} has {mesh.ndim} dimensions; give the one that replicas are in, as "
            f'mesh["{(mesh.mesh_dim_names or ("dp",))[0]}"]'
        )
    if mesh.get_coordinate() is None:
        raise _not_a_member(caller)
    return mesh.get_group()


def _not_a_member(caller: str) -> UsageError:
    return UsageError(
        f"{caller}: rank {dist.get_rank() if dist.is_initialized() else 0} is not in the group; call it on the ranks "
        "that are, as by: if torch.distributed.get_rank() in ranks. Other ranks need not take part; for the whole "
        "world, leave group out"
    )


def comm_like(group: dist.ProcessGroup, device: torch.device, replica: dist.ProcessGroup | None = None) -> ProcessComm:
    """A Comm with process groups of its own, and the timeout of `group`, which others use. Collective.

    It has the ranks of `group`. `replica` has those that train one replica with this one; if `group` has one rank of
    each replica, the Comm has all ranks of these replicas.
    """
    rows = _introduce(group, device, replica)
    while _unused:
        _unused.pop().close()
    ranks = [rank for rank, *_ in rows]
    on_gpu = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
    store, place = default_group().get_group_store(), (ranks.index(dist.get_rank()), len(ranks))
    name, timeout = f"thinwire/{rows[0][1]}", timeout_of(group)
    watch = start_watch(dist.PrefixStore(f"{name}/watch", store), dist.get_rank(), ranks, timeout)
    pair = members_group_pair(store, name, place, "nccl" if on_gpu else "gloo", timeout)
    link = "world" if len(ranks) == dist.get_world_size() else "group"
    nodes = number_nodes([tuple(key) for _, _, *key in rows])
    comm = ProcessComm(pair, ranks, link, Ledger(), device, nodes, peers.world_secret, watch)
    try:
        peers.check_peers(pair, peers.world_secret)
    except RunError:
        comm.close()
        raise
    atexit.register(comm.close)
    return comm


def close_after(owner: object, comm: Comm) -> None:
    """If the owner is dropped without closing a Comm that `comm_like` made, close that when the next one is made.

    Not at once: the garbage collector works in any thread, also in those that would be ended, and ranks do not drop
    their owners at the same time. When they make the next Comm, they have met.
    """
    weakref.finalize(owner, _unused.append, comm).atexit = False  # when the process ends, all are closed


def _introduce(group: dist.ProcessGroup, device: torch.device, replica: dist.ProcessGroup | None) -> list[list[int]]:
    """Of every rank: its rank in the world, the number that its group drew, and the key of its node; in rank order."""
    own = set() if replica is None else set(dist.get_process_group_ranks(replica))
    num_inside = len(own & set(dist.get_process_group_ranks(group)))
    number = default_group().get_group_store().add(COUNTER, 1) if group.rank() == 0 else 0
    told = gather_numbers([dist.get_rank(), number, *own_node_key(), num_inside, len(own)], group, device)
    rows = [[rank, told[0][1], *key] for rank, _, *key, _, _ in told]
    if all(inside == size for *_, inside, size in told):
        return sorted(rows)
    if replica is None or {(inside, size) for *_, inside, size in told} != {(1, len(own))}:
        raise _part_of_a_replica(told)
    if len({length for (length,) in gather_numbers([len(rows)], replica, device)}) > 1:
        raise UsageError("the ranks of a replica gave groups of different sizes; give one rank of each replica")
    tables = gather_numbers([number for row in rows for number in row], replica, device)
    return sorted(table[i : i + len(rows[0])] for table in tables for i in range(0, len(table), len(rows[0])))


def _part_of_a_replica(told: Sequence[Sequence[int]]) -> UsageError:
    found = ", ".join(f"{inside} of {size} with rank {rank}" for rank, *_, inside, size in told)
    return UsageError(
        f"the group has a part of a replica, whose ranks exchange gradients in every step or share a model ({found}); "
        'give one rank of each replica, as the dimension mesh["dp"] has, or all ranks of all replicas'
    )
