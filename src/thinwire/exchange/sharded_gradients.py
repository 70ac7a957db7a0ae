"""Gradients of a model that fully_shard divides over the ranks of a node, reduced between nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.sharding import ShardGroup, shard_groups
from thinwire.errors import RunError
from thinwire.exchange.held_states import HeldStates
from thinwire.kernels import all_finite_in
from thinwire.reducers.base import Named, Reducer, on_reals


class ShardedGradients:
    """Reduces the gradients of each FSDP module between ranks with the same rows, after torch has scattered them.

    The backward pass waits meanwhile. A state belongs to the parameters of one module, of which it knows this rank's
    rows. Parameters of which a rank has no row are left out.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, comm: Comm, scale: Callable[[], float] | None) -> None:
        self.comm, self.reducer, self.scale = comm, on_reals(reducer), scale
        self.groups = shard_groups(model)
        self.buckets = [[part.name for part in group.parts if part.numel] for group in self.groups]
        self.states = [self.reducer.init({p.name: p.rows() for p in group.parts if p.numel}) for group in self.groups]
        self._held_states = HeldStates(len(self.groups))
        for number, group in enumerate(self.groups):
            group.module.set_all_reduce_hook(lambda flat, number=number: self._exchange(number, flat))  # type: ignore[misc]

    @torch.no_grad()
    def _exchange(self, number: int, flat: Tensor) -> None:
        """Replace gradients by their mean over nodes; `flat` has this rank's rows of all gradients of a module."""
        gradients = _views(flat, self.groups[number])
        if not gradients:
            return
        scale = self.scale() if self.scale is not None else 1.0
        given = {name: g / scale for name, g in gradients.items()} if scale != 1.0 else gradients
        reduced = self.reducer.reduce(given, self.states[number], self.comm)
        for name, gradient in gradients.items():
            gradient.copy_(reduced.mean[name] * scale if scale != 1.0 else reduced.mean[name])
        if self.scale is None:
            self.states[number] = reduced.state
        else:
            is_finite = bool(all_finite_in(list(reduced.mean.values())))
            self.states = self._held_states.hold(number, reduced.state, is_finite, self.states)


def _views(flat: Tensor, group: ShardGroup) -> Named:
    """The gradients in what torch scattered, by name."""
    if flat.numel() != sum(part.padded_numel for part in group.parts):
        raise RunError(
            f"one of {', '.join(part.name for part in group.parts)} got no gradient, so the others cannot be told "
            "apart; call model.set_reduce_scatter_unused_params(True) after fully_shard"
        )
    found, begin = {}, 0
    for part in group.parts:
        if part.numel:
            found[part.name] = flat[begin : begin + part.numel].view(part.shape)
        begin += part.padded_numel
    return found
