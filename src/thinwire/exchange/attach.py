"""attach: the gradient exchange of a DDP in a loop that is not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.join import is_single_process
from thinwire.comm.ledger import Ledger
from thinwire.comm.process import ProcessComm
from thinwire.comm.process_groups import ProcessGroup
from thinwire.comm.sharding import between_replicas, device_of, is_sharded, replica_group, reshard
from thinwire.comm.user_groups import UserGroup, close_after, comm_like, process_group
from thinwire.common.dtypes import refuse_meta, refuse_unfit
from thinwire.common.messages import say
from thinwire.errors import UsageError
from thinwire.exchange.alone import Alone
from thinwire.exchange.overlapped import Overlapped
from thinwire.exchange.sharded_gradients import ShardedGradients
from thinwire.reducers.base import Reducer
from thinwire.reducers.states import load_states
from thinwire.spec import Spec, parse


class Attached:
    """The exchange that a DDP, or a sharded model, uses.

    Save its `state_dict` with the model's: without its residuals a resumed run is another one. `ledger` counts what it
    sends; what torch sends for itself (buffers, or shards inside a node) is not in it.
    """

    def __init__(self, exchange: Overlapped | ShardedGradients, spec: str, comm: Comm) -> None:
        self._exchange, self._spec, self._own_comm = exchange, spec, comm

    @property
    def ledger(self) -> Ledger:
        """What was sent."""
        return self._exchange.comm.ledger

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, tensors by parameter name; every rank has its own."""
        return {**self._identity(), "reducer": [dict(state) for state in self._exchange.states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; refused if it is of another model, reducer or bucket size."""
        for what, here in self._identity().items():
            there = state.get(what)
            if there != here:
                raise UsageError(f"the state is of {what} {there}, and this is {what} {here}; load the one that fits")
        self._exchange.states = load_states(self._exchange.states, state["reducer"])

    def _identity(self) -> dict[str, Any]:
        comm = self._own_comm
        return {"reducer spec": self._spec, "rank": f"{comm.rank} of {comm.size}", "buckets": self._exchange.buckets}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the DDP, or one that is saved whole, has no exchange."""
        return type(None), ()

    def close(self) -> None:
        """End the communication thread and its groups, as the process's end does; the model cannot train any more."""
        self._own_comm.close()


class NotAttached(Alone, Attached):
    """What a single process gets: there is nothing to exchange."""


def attach(  # long: an example
    model: nn.Module,
    spec: str,
    *,
    bucket_mb: float = 25.0,
    scaler: torch.amp.GradScaler | None = None,
    group: UserGroup = "world",
) -> Attached:
    """Exchange gradients with one of thinwire's reducers; your loop stays as it is.

    The model is a DistributedDataParallel, whose gradients are exchanged between all ranks of its process group, or one
    that fully_shard has divided over the ranks of a node: then gradients are exchanged between nodes. Call it on each
    of these ranks, after making that and before the first step. `no_sync` (set_requires_gradient_sync), clipping,
    unused parameters, torch.compile (of the DDP, or of the model in it) and any optimizer work as before. If a DDP
    trains with a GradScaler, give it here: its scale changes, and what a reducer keeps from step to step must not be
    counted in it. In a single process a plain model will do: nothing is exchanged, and it says so.

    `bucket_mb` is for a DDP; shards have their own groups. `group` is for shards whose replicas are a part of the
    world: the mesh dimension, or the process group, that has one rank of each replica, or all ranks of all of them.

    >>> import os, torch, torch.distributed as dist, thinwire as tw
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> attached = tw.attach(ddp, "error_feedback(maxnorm(bits=4))")
    >>> ddp(torch.ones(3, 4)).sum().backward()
    >>> sorted(attached.state_dict()["reducer"][0])
    ['inner/step', 'residual/bias', 'residual/weight']
    >>> attached.close(); dist.destroy_process_group()
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile(ddp) holds it
    _refuse_strategy(parse(spec))
    reducer = registry.build("reducers", spec)
    if not bucket_mb > 0:
        raise UsageError(f"attach: bucket_mb={bucket_mb}; possible: more than 0")
    if not isinstance(model, DistributedDataParallel) and isinstance(model, nn.Module) and is_single_process():
        say("attach: a single process, so there is nothing to exchange", 0, once=True)
        return NotAttached()
    _refuse_model(model)
    if isinstance(model, DistributedDataParallel) and group != "world":
        raise UsageError("attach: a DDP exchanges between the ranks of its process_group; leave group out")
    ranks = process_group(group, "attach")
    if is_sharded(model) and ranks.size() == 1:
        say("attach: a group of one rank, so there is nothing to exchange", 0, once=True)
        return NotAttached()
    scale = None if scaler is None else scaler.get_scale
    if scaler is not None and is_sharded(model):
        raise UsageError(
            "attach: scaler given, but sharded models have none here; compute in bfloat16, which needs none"
        )
    if isinstance(model, DistributedDataParallel):
        comm = comm_like(model.process_group, next(model.parameters()).device)
        exchange: Overlapped | ShardedGradients = _attach_ddp(model, reducer, comm, bucket_mb, scale)
    else:
        exchange, comm = _attach_shards(model, reducer, ranks)
    attached = Attached(exchange, str(parse(spec)), comm)
    close_after(attached, comm)
    model._thinwire = attached  # lives as long as the model, whose hook does not keep it
    return attached


def _attach_shards(model: nn.Module, reducer: Reducer, group: ProcessGroup) -> tuple[ShardedGradients, ProcessComm]:
    reshard(model)
    refuse_unfit(model, "attach")
    refuse_meta(model)
    comm = comm_like(group, device_of(model), replica_group(model))
    try:
        return ShardedGradients(model, reducer, between_replicas(model, comm)), comm
    except UsageError:
        comm.close()
        raise


def _attach_ddp(
    ddp: DistributedDataParallel, reducer: Reducer, comm: ProcessComm, bucket_mb: float,
    scale: Callable[[], float] | None,
) -> Overlapped:  # fmt: skip
    try:
        return Overlapped(ddp, reducer, comm, bucket_mb, scale, in_own_loop=True)
    except RuntimeError as error:
        comm.close()
        raise UsageError(f"attach: DDP refuses ({str(error).splitlines()[0]}); attach before any other hook") from error


def _refuse_model(model: Any) -> None:
    """Raise UsageError for what is neither DDP nor sharded, or cannot be attached to."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if not is_ddp and not (isinstance(model, nn.Module) and is_sharded(model)):
        raise UsageError(
            f"attach: {type(model).__name__} given; wrap the model in DistributedDataParallel first, or shard it by "
            "fully_shard"
        )
    if getattr(model, "_thinwire", None) is not None:
        raise UsageError("attach: this model has, or had, an exchange; it takes one for its whole life. Make a new one")
    if is_ddp:
        refuse_unfit(model.module, "attach", model.parameters_to_ignore)


def _refuse_strategy(spec: Spec) -> None:
    """Raise UsageError for the name of a strategy, which is no reducer."""
    if spec.name not in registry.TABLE["strategies"]:
        return
    reducer = spec.options.get("reducer") if spec.name == "data_parallel" else None
    raise UsageError(
        f"attach: {spec.name} is a strategy, not a reducer: it makes the updates too. "
        + (f'Try tw.attach(ddp, "{reducer}"). ' if reducer else "")
        + f'Without DDP and optimizer: with tw.join() as comm: trainer = tw.prepare("{spec}", model=model, '
        "optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=loss, comm=comm), and in the loop trainer.step(batch)"
    )
