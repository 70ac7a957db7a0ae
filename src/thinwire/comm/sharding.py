"""Models that a DDP or fully_shard trains on a group of ranks: which ranks these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.process import ProcessComm
from thinwire.common.tensors import local_part
from thinwire.errors import UsageError


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard has divided the model's parameters."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def device_of(model: nn.Module) -> torch.device:
    """The device that computes; parameters that fully_shard offloads are on the CPU meanwhile."""
    kinds = {p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)}
    if "cuda" in kinds:
        return torch.device("cuda", torch.cuda.current_device())
    return next(model.parameters()).device


def replica_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The process group of the ranks that train one replica of a model together; None for a plain model."""
    if isinstance(model, DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
        return group
    mesh = _shard_mesh(model)
    return None if mesh is None else mesh.get_group()


def replica_ranks(model: nn.Module, comm: Comm) -> list[int]:
    """The ranks of `comm` that train one replica of a model with this one, in order: this one alone, if it is plain."""
    if isinstance(model, DistributedDataParallel):
        return _in_comm(dist.get_process_group_ranks(model.process_group), comm, "the DDP's process group")
    mesh = _shard_mesh(model)
    return [comm.rank] if mesh is None else _in_comm(mesh.mesh.tolist(), comm, "the mesh of fully_shard")


def _shard_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh that fully_shard divided the parameters over; None if they are not divided."""
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if meshes and not is_sharded(model):
        raise UsageError(
            "the parameters are divided by something else than fully_shard, as by tensor parallelism, which is not "
            "supported: parameters that its ranks have in common could differ after an exchange; use fully_shard"
        )
    if len(meshes) > 1 or any(mesh.ndim != 1 for mesh in meshes):
        raise UsageError(
            f"the parameters are sharded over {' and '.join(str(mesh) for mesh in meshes)}; possible: one mesh "
            'of one dimension, the ranks of a node. Try: mesh = init_device_mesh("cpu", (nodes, ranks_per_node), '
            'mesh_dim_names=("nodes", "shards")), and fully_shard(module, mesh=mesh["shards"]) for each module'
        )
    return next(iter(meshes), None)


def _in_comm(world_ranks: Sequence[int], comm: Comm, what: str) -> list[int]:
    assert isinstance(comm, ProcessComm)
    if outside := sorted(set(world_ranks) - set(comm.members)):
        raise UsageError(f"{what} has ranks {outside}, which are not in comm")
    return [comm.members.index(rank) for rank in world_ranks]


def reshard(model: nn.Module) -> None:
    """Drop whole parameters that a forward pass has gathered: they would not change with the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def between_replicas(model: nn.Module, world: Comm) -> Comm:
    """The ranks that have the same rows of a sharded model as this one, each in another replica. Collective."""
    with world.ledger.purpose("start"):
        replicas = sorted({tuple(ranks) for ranks in all_gather_json(world, replica_ranks(model, world))})
    if len(replicas) == 1:
        raise UsageError(
            f"all {world.size} ranks train one replica, each with a shard, so there is nothing to exchange between "
            "replicas; make the mesh of fully_shard of the ranks of one node"
        )
    if len({len(ranks) for ranks in replicas}) > 1:
        raise UsageError(f"replicas of {sorted({len(r) for r in replicas})} shards; give all the same number")
    return world.split([list(ranks) for ranks in zip(*replicas, strict=True)], "between")


class RowsOfParameter(NamedTuple):
    """This rank's rows of a parameter, as torch scatters their gradient: with padding behind them."""

    name: str
    shape: torch.Size
    padded_numel: int
    rows: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        """Elements that are no padding."""
        return self.shape.numel()


class ShardGroup(NamedTuple):
    """The parameters whose gradients one FSDP module scatters together."""

    module: FSDPModule
    parts: list[RowsOfParameter]


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """The groups of a model's parameters, some of which may have nothing to train."""
    names = {id(p): name for name, p in model.named_parameters()}
    found, seen = [], []
    for path, module in model.named_modules():
        if (
            not isinstance(module, FSDPModule) or module._get_fsdp_state() in seen
        ):  # fully_shard([a, b]) makes one state
            continue
        seen.append(module._get_fsdp_state())
        groups: list[Any] = seen[-1]._fsdp_param_groups
        if len(groups) > 1:
            raise UsageError(
                f"attach: {path or 'the model'} has {len(groups)} parameter groups; possible: 1, of one mesh"
            )
        parts = [_rows(names, p) for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
        if groups:
            found.append(ShardGroup(module, parts))
    sharded = {part.name for group in found for part in group.parts}
    if others := sorted({name for name, p in model.named_parameters() if p.requires_grad} - sharded):
        raise UsageError(
            f"attach: {others[0]} is not sharded by fully_shard; call fully_shard(model) for the whole model, too"
        )
    return found


def _rows(names: dict[int, str], fsdp_param: Any) -> RowsOfParameter:
    parameter = fsdp_param.sharded_param
    padded: int = fsdp_param.padded_sharded_param_size.numel()
    return RowsOfParameter(names[id(parameter)], fsdp_param.sharded_size, padded, lambda: local_part(parameter))
