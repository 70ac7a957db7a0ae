"""Models that a DDP or fully_shard trains on a group of ranks: which ranks these are."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.base import Comm
from thinwire.comm.process import ProcessComm
from thinwire.errors import UsageError


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard has divided the model's parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def replica_ranks(model: nn.Module, comm: Comm) -> list[int]:
    """The ranks of `comm` that train one replica of a model with this one, in order: this one alone, if it is plain."""
    if isinstance(model, DistributedDataParallel):
        return _in_comm(dist.get_process_group_ranks(model.process_group), comm, "the DDP's process group")
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if not meshes:
        return [comm.rank]
    if len(meshes) > 1 or next(iter(meshes)).ndim != 1:
        raise UsageError(
            f"rounds: the parameters are sharded over {' and '.join(str(mesh) for mesh in meshes)}; possible: one mesh "
            'of one dimension, the ranks of a node. Try: mesh = init_device_mesh("cpu", (nodes, ranks_per_node), '
            'mesh_dim_names=("nodes", "shards")), and fully_shard(module, mesh=mesh["shards"]) for each module'
        )
    return _in_comm(next(iter(meshes)).mesh.tolist(), comm, "the mesh of fully_shard")


def _in_comm(world_ranks: Sequence[int], comm: Comm, what: str) -> list[int]:
    assert isinstance(comm, ProcessComm)
    members = dist.get_process_group_ranks(comm.group)
    if outside := sorted(set(world_ranks) - set(members)):
        raise UsageError(f"rounds: {what} has ranks {outside}, which are not in comm")
    return [members.index(rank) for rank in world_ranks]


def reshard(model: nn.Module) -> None:
    """Drop whole parameters that a forward pass has gathered: they would not change with the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
