"""attach: the gradient exchange of a DDP in a loop that is not ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from thinwire import registry
from thinwire.comm.join import comm_like
from thinwire.comm.ledger import Ledger
from thinwire.common.dtypes import refuse_unfit
from thinwire.errors import UsageError
from thinwire.exchange.overlapped import Overlapped
from thinwire.reducers.states import load_states
from thinwire.spec import Spec, parse


class Attached:
    """The exchange that a DDP uses.

    Save its `state_dict` with the model's: without its residuals a resumed run is another one. `ledger` counts what it
    sends; what DDP sends for itself (buffers, say) is not in it.
    """

    def __init__(self, exchange: Overlapped, spec: str) -> None:
        self._exchange = exchange
        self._spec = spec

    @property
    def ledger(self) -> Ledger:
        """What was sent."""
        return self._exchange.comm.ledger

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, tensors by parameter name; every rank has its own."""
        return {**self._identity(), "reducer": self._exchange.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; refused if it is of another model, reducer or bucket size."""
        for what, here in self._identity().items():
            there = state.get(what)
            if there != here:
                raise UsageError(f"the state is of {what} {there}, and this is {what} {here}; load the one that fits")
        self._exchange.states = load_states(self._exchange.states, state["reducer"])

    def _identity(self) -> dict[str, Any]:
        comm = self._exchange.comm
        return {"reducer spec": self._spec, "rank": f"{comm.rank} of {comm.size}", "buckets": self._exchange.buckets}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the DDP, or one that is saved whole, has no exchange."""
        return type(None), ()

    def close(self) -> None:
        """End the communication thread and its groups, as the process's end does; the DDP cannot train any more."""
        self._exchange.comm.close()


def attach(
    ddp: DistributedDataParallel,
    spec: str,
    *,
    bucket_mb: float = 25.0,
    scaler: torch.amp.GradScaler | None = None,
) -> Attached:
    """Exchange a DDP's gradients with one of thinwire's reducers; your loop stays as it is.

    Call it on every rank, after making the DDP and before the first step. `no_sync`, clipping, unused parameters,
    torch.compile (of the DDP, or of the model in it) and any optimizer work as before. With a GradScaler, give it
    here: its scale changes, and what a reducer keeps from step to step must not be counted in it.

    >>> import os, torch, torch.distributed as dist, thinwire as tw
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> attached = tw.attach(ddp, "error_feedback(maxnorm(bits=4))")
    >>> ddp(torch.ones(3, 4)).sum().backward()
    >>> sorted(attached.state_dict()["reducer"][0])
    ['inner/step', 'residual/bias', 'residual/weight']
    >>> attached.close(); dist.destroy_process_group()
    """
    ddp = getattr(ddp, "_orig_mod", ddp)  # torch.compile(ddp) holds it
    _refuse_model(ddp)
    if not bucket_mb > 0:
        raise UsageError(f"attach: bucket_mb={bucket_mb}; possible: more than 0")
    _refuse_strategy(parse(spec))
    reducer = registry.build("reducers", spec)
    comm = comm_like(ddp.process_group, next(ddp.parameters()).device)
    scale = None if scaler is None else scaler.get_scale
    try:
        exchange = Overlapped(ddp, reducer, comm, bucket_mb, scale, in_own_loop=True)
    except RuntimeError as error:
        comm.close()
        raise UsageError(f"attach: DDP refuses ({str(error).splitlines()[0]}); attach before any other hook") from error
    attached = Attached(exchange, str(parse(spec)))
    ddp._thinwire = attached  # lives as long as the DDP, whose hook does not keep it
    return attached


def _refuse_model(ddp: Any) -> None:
    """Raise UsageError for what is no DDP, or one that cannot be attached to."""
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(f"attach: {type(ddp).__name__} given; wrap the model in DistributedDataParallel first")
    if getattr(ddp, "_thinwire", None) is not None:
        raise UsageError("attach: this DDP has, or had, an exchange; it takes one for its whole life. Make a new DDP")
    refuse_unfit(ddp.module, "attach", ddp.parameters_to_ignore)


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
