"""The whole network from its shards, on every rank that has room for it."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.common.memory import free_memory
from thinwire.exchange.sharded import ShardedTensors
from thinwire.exchange.streamed import Factors, times_factor
from thinwire.surgery.meta import with_tensors
from thinwire.surgery.standard import to_standard_modules


@torch.no_grad()
def assemble(model: nn.Module, sharded: ShardedTensors, factors: Factors) -> nn.Module:
    """The whole network on every rank. Collective."""
    return to_standard_modules(
        with_tensors(model, {name: times_factor(t, factors.get(name)) for name, t in sharded.gather()})
    )


def free_bytes(device: torch.device, comm: Comm) -> float:
    """Free memory of this rank's device; ranks on one node share it."""
    neighbours = comm.nodes.count(comm.nodes[comm.rank])
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / max(1, neighbours // torch.cuda.device_count())
    return free_memory() / neighbours
