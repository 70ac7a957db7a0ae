"""The optimizer's state of a sharded network: moments that travel with their slices, and counters.

Moments are tensors of their parameter's shape, so they are sharded and sliced as the parameter is. Counters, such as
Adam's number of steps, have no shape to slice. They stay on their rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.exchange.sharded import Contribution, ShardedTensors
from thinwire.optim import OptimizerFactory
from thinwire.surgery.moments import Moment, OptimizerState, copy_state, probe_optimizer
from thinwire.surgery.slices import Slices, UnitIndices

Moments = dict[str, dict[str, Moment]]  # of each parameter, by name of the moment


def probe_moments(
    optimizer: OptimizerFactory, parameters: Mapping[str, nn.Parameter], device: torch.device
) -> tuple[Moments, OptimizerState]:
    """The moments that an optimizer keeps of these parameters, and the counters that it begins with.

    Raises UsageError if it keeps something that cannot be sliced.
    """
    by_dtype = {
        dtype: probe_optimizer(optimizer, torch.empty(0, dtype=dtype, device=device))
        for dtype in {p.dtype: None for p in parameters.values()}
    }
    moments: Moments = {}
    for name, parameter in parameters.items():
        for kind, moment in by_dtype[parameter.dtype][0].items():
            moments.setdefault(kind, {})[name] = moment
    return moments, next(iter(by_dtype.values()))[1] if by_dtype else {}


class ShardedMoments:
    """The moments of all parameters, sharded over the ranks, and the counters of this rank."""

    def __init__(
        self, slices: Slices, comm: Comm, device: torch.device, moments: Moments, initial_counters: OptimizerState
    ) -> None:
        self.by_kind = {
            kind: ShardedTensors(
                slices, comm, device, {name: m.dtype for name, m in of.items()}, next(iter(of.values())).initial
            )
            for kind, of in moments.items()
        }
        self.initial_counters = initial_counters
        self.counters: dict[str, OptimizerState] = {}  # by parameter, of those that this rank has trained

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
        """The slices of moments that this rank's optimizer has, to be collected; its counters are kept here.

        A parameter that the optimizer has not seen has its moments as they are at the start.
        """
        if not self.by_kind:
            return {}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, p in trained.items():
            state = optimizer.state.get(p) or self.initial_counters
            self.counters[name] = {key: value for key, value in state.items() if key not in self.by_kind}
        return {
            kind: {
                name: optimizer.state[p][kind]
                if p in optimizer.state
                else torch.full_like(p, sharded.fill_value, dtype=sharded.layout.dtypes[name])
                for name, p in trained.items()
            }
            for kind, sharded in self.by_kind.items()
        }

    def collect(
        self, moments: dict[str, dict[str, Tensor]], units: Sequence[UnitIndices], contribution: Contribution
    ) -> None:
        """Every rank's slices of moments back into the shards. The slices are emptied, to save memory. Collective."""
        for kind, sharded in self.by_kind.items():
            sharded.collect(moments.pop(kind), units, contribution)

    def deal(self, units: Sequence[UnitIndices]) -> dict[str, OptimizerState]:
        """The state for an optimizer of this rank's slices, by parameter; empty if there are no moments. Collective.

        A parameter that this rank has never had gets the counters of another one.
        """
        moments = {kind: sharded.deal(units) for kind, sharded in self.by_kind.items()}
        others = next(iter(self.counters.values()), self.initial_counters)
        return {
            name: copy_state(self.counters.get(name, others)) | {kind: of[name] for kind, of in moments.items()}
            for name in next(iter(moments.values()), {})
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards of the moments, and its counters."""
        return {"shards": {kind: sharded.shards for kind, sharded in self.by_kind.items()}, "counters": self.counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state with the same kinds of moments."""
        for kind, sharded in self.by_kind.items():
            sharded.load_shards(state["shards"][kind])
        self.counters = {name: copy_state(counters) for name, counters in state["counters"].items()}
