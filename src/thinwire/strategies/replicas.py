"""Equal weights on all ranks: at the start, and in the model that is handed out."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.dtypes import is_averaged, refuse_meta
from thinwire.common.messages import say
from thinwire.common.tensors import named_persistent_buffers


def replicate(model: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's parameters and buffers; say so if they were not equal."""
    refuse_meta(model)
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in tensors]
    with comm.ledger.purpose("start"):
        coalesced(tensors, comm.broadcast)
        say_if_changed(before, tensors, comm)


def say_if_changed(before: Sequence[Tensor], after: Sequence[Tensor], comm: Comm) -> None:
    """Say how many ranks do not begin with the weights that they were given. Collective."""
    changed = not all(torch.equal(old, new) or old.isnan().any() for old, new in zip(before, after, strict=True))
    others = int(torch.cat(comm.all_gather(torch.tensor([changed], dtype=torch.uint8))).sum())
    if others:
        say(f"the model differed between ranks; {others} of {comm.size} now begin with rank 0's weights", comm.rank)


def average_buffers(model: nn.Module, comm: Comm) -> None:
    """Make buffers equal on all ranks: the mean of floating-point and complex ones, rank 0's value of the others.

    Only those that are part of the model's state: the others are caches that every rank computes for itself.
    """
    buffers = list(named_persistent_buffers(model).values())
    with comm.ledger.purpose("sync", instead_of="train"):
        coalesced([b for b in buffers if is_averaged(b)], comm.mean)
        coalesced([b for b in buffers if not is_averaged(b)], comm.broadcast)


def consolidated(model: nn.Module, comm: Comm, apart: Sequence[str] = ()) -> nn.Module:
    """A copy of a model, equal on all ranks: the mean of those parameters that may differ between them."""
    whole = copy.deepcopy(model)
    with comm.ledger.purpose("sync", instead_of="train"):
        coalesced([whole.get_parameter(name) for name in apart], comm.mean)
    average_buffers(whole, comm)
    return whole
