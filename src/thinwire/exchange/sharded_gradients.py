"""Gradients of a model that fully_shard divides over the ranks of a node, reduced between nodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.comm.background import keep_for_stream
from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.comm.sharding import ShardGroup, device_of, shard_groups
from thinwire.common.tensors import local_part
from thinwire.errors import RunError
from thinwire.reducers.base import Named, Reducer, on_reals


class ShardedGradients:
    """Reduces the gradients of each FSDP module between ranks with the same rows, after torch has scattered them.

    The backward pass waits meanwhile. A state belongs to the parameters of one module, of which it knows this rank's
    rows. Parameters of which a rank has no row are left out. All nodes begin with the weights of the first one.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, comm: Comm) -> None:
        self.comm, self.reducer = comm, on_reals(reducer)
        self.groups = shard_groups(model)
        self.buckets = [[part.name for part in group.parts if part.numel] for group in self.groups]
        device = device_of(model)
        rows = [{p.name: p.rows().to(device) for p in group.parts if p.numel} for group in self.groups]
        self.states = [self.reducer.init(parts) if parts else {} for parts in rows]
        with comm.ledger.purpose("start"):
            coalesced([local_part(t) for t in (*model.parameters(), *model.buffers())], comm.broadcast)
        for number, group in enumerate(self.groups):
            group.module.set_all_reduce_hook(lambda flat, number=number: self._exchange(number, flat))  # type: ignore[misc]

    @torch.no_grad()
    def _exchange(self, number: int, flat: Tensor) -> None:
        """Replace gradients by their mean over nodes; `flat` has this rank's rows of all gradients of a module."""
        gradients = _views(flat, self.groups[number])
        if gradients:
            reduced = self.reducer.reduce(gradients, self.states[number], self.comm)
            keep_for_stream(self.states[number].values())
            self.states[number] = reduced.state
            torch._foreach_copy_(list(gradients.values()), [reduced.mean[name] for name in gradients])
        keep_for_stream([flat])  # torch frees it while this stream may still cast it


def _views(flat: Tensor, group: ShardGroup) -> Named:
    """The gradients in what torch scattered, by name."""
    if flat.numel() != sum(part.padded_numel for part in group.parts):
        names = ", ".join(part.name for part in group.parts) or "a module that was frozen when attached"
        raise RunError(
            f"gradients of {names} cannot be told apart: one of them got none, or was frozen or unfrozen after attach. "
            "Call model.set_reduce_scatter_unused_params(True) after fully_shard, and freeze parameters before attach"
        )
    found, begin = {}, 0
    for part in group.parts:
        if part.numel:
            found[part.name] = flat[begin : begin + part.numel].view(part.shape)
        begin += part.padded_numel
    return found
