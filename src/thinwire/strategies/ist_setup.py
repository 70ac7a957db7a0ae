"""How a model begins with `ist`: its slices are found, and its tensors are sharded over the ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.common.tensors import named_tensors
from thinwire.errors import UsageError
from thinwire.exchange.sharded import ShardedTensors
from thinwire.strategies.replicas import say_if_changed
from thinwire.surgery.attention import unpack_attention
from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.axes.residual import residual_blocks_of
from thinwire.surgery.meta import initial_tensors, to_meta
from thinwire.surgery.slices import Slices
from thinwire.surgery.standard import to_standard_modules

Cut = Literal["units", "blocks"]
Scale = Literal["train", "eval", "norm"]
Branches = Literal["small", "given"]


def find_slices(model: nn.Module, num_ranks: int, cut: Cut, scale: Scale) -> Slices:
    """The slices of a model's units or residual blocks. A UsageError leaves the model as it was."""
    unpack_attention(model)
    try:
        slices = Slices(model, residual_blocks_of(model) if cut == "blocks" else axes_of(model))
        slices.check(model, num_ranks, scale == "train")
        if scale == "norm":
            bare = [next(iter(axis.used_by)) for axis in slices.axes if isinstance(axis, Axis) and not axis.normed]
            if bare or cut == "blocks":
                raise UsageError(f"scale=norm, but no norm follows {(bare or ['a block'])[0]}; try scale=eval")
    except UsageError as error:
        to_standard_modules(model)
        raise UsageError(f"ist: {error}") from None
    return slices


def device_of(model: nn.Module, comm: Comm) -> torch.device:
    """The device of a model's tensors; of a model on the meta device, the one on which torch makes new tensors."""
    devices = [t.device for t in named_tensors(model).values() if comm.is_dry or not t.is_meta]
    return devices[0] if devices else torch.get_default_device()


def shard_model(model: nn.Module, slices: Slices, comm: Comm, device: torch.device) -> ShardedTensors:
    """Rank 0's tensors of a model, sharded over all ranks; the model is moved to the meta device. Collective.

    Rank 0 initializes the modules that are on the meta device already.
    """
    sharded = ShardedTensors(slices, comm, device, {name: t.dtype for name, t in slices.tensors.items()})
    given = {name: t for name, t in to_meta(model).items() if comm.is_dry or not t.is_meta}
    if comm.rank == 0 and len(given) < len(slices.tensors):
        given = initial_tensors(model, device) | given
    with comm.ledger.purpose("start", instead_of="train"):
        sharded.scatter(given)
        own = [sharded.shard_of(name, tensor) for name, tensor in given.items()]
        say_if_changed(own, [sharded.shards[name] for name in given], comm)
    return sharded
