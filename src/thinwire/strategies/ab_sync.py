"""How groups combine what they trained: option `sync` of `ab`.

    learned   Ā = (1/n_A)·Σ Aᵢ over the n_A ranks that trained A, and B̄ likewise
    stale     Ā = (1/n)·Σ Aᵢ over all n ranks, and B̄ likewise
    full      W = (1/n)·Σ AᵢBᵢ

Everything that is not factored becomes its mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.exchange.factoring import Factoring
from thinwire.strategies.ab_groups import Groups, Role
from thinwire.surgery.lowrank import Factored

Sync = Literal["learned", "stale", "full"]


@torch.no_grad()
def average_groups(model: nn.Module, sync: Sync, factoring: Factoring, groups: Groups, comm: Comm) -> None:
    """Average what groups trained over all ranks, in place; with `full`, layers are full afterwards. Collective."""
    if sync == "full":
        factoring.merge(model)
    layers = factoring.factored_layers(model).values()
    if sync == "learned":
        role = groups.role_of(comm.rank)
        for layer in layers:
            for factor, weight in (("A", layer.A), ("B", layer.B)):
                weight.mul_(comm.size / groups.num_training(factor) if factor in role else 0.0)
    factors = {id(weight) for layer in layers for weight in (layer.A, layer.B)}
    with comm.ledger.purpose("sync", instead_of="train"):
        coalesced([p for p in model.parameters() if p.requires_grad or id(p) in factors], comm.mean)


def half_decay_factors(layers: Iterable[Factored], sync: Sync, role: Role) -> list[Tensor]:
    """The factors that decay at half the rate, so that W = A·B decays as a full weight would.

    These are A and B where one rank trains both, or where each is trained by a part of the ranks and a sync takes both
    in full. The other syncs take the mean with what did not decay, which halves the decay by itself.
    """
    return [factor for x in layers for factor in (x.A, x.B)] if role == "AB" or sync == "learned" else []
