"""Make the replicas of a model equal on all ranks: at the start, and in a copy for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.dtypes import is_averaged, refuse_meta
from thinwire.common.messages import say
from thinwire.common.tensors import local_part, named_persistent_buffers
from thinwire.surgery.memory_format import usual_copy
from thinwire.surgery.moments import OptimizerState, states_by_name

_KNOWN_EQUAL: WeakSet[nn.Module] = WeakSet()


@contextmanager
def known_equal(model: nn.Module) -> Iterator[None]:
    """Inside, `replicate` does not send this model: it was replicated and has not changed since."""
    _KNOWN_EQUAL.add(model)
    try:
        yield
    finally:
        _KNOWN_EQUAL.discard(model)


def replicate(model: nn.Module, comm: Comm) -> None:
    """Broadcast rank 0's parameters and buffers; tell the user if some rank had others."""
    if model in _KNOWN_EQUAL:
        return
    if not comm.is_dry:
        refuse_meta(model)
    tensors = [local_part(t) for t in (*model.parameters(), *model.buffers())]
    before = [t.detach().clone() for t in tensors]
    with comm.ledger.purpose("start", instead_of="train"):
        coalesced(tensors, comm.broadcast)
        say_if_changed(before, tensors, comm)


def say_if_changed(before: Sequence[Tensor], after: Sequence[Tensor], comm: Comm) -> None:
    """Tell the user how many ranks begin with other weights than their own. Collective."""
    changed = not all(torch.equal(old, new) or old.isnan().any() for old, new in zip(before, after, strict=True))
    num_changed = int(torch.cat(comm.all_gather(torch.tensor([changed], dtype=torch.uint8))).sum())
    if num_changed:
        say(
            f"the model differed between ranks; {num_changed} of {comm.size} now begin with rank 0's weights", comm.rank
        )


def average_buffers(model: nn.Module, comm: Comm) -> None:
    """Make buffers equal on all ranks: the mean of floating-point and complex ones, rank 0's value of the others.

    Only buffers in the model's state_dict: the others are caches that every rank computes for itself.
    """
    buffers = list(named_persistent_buffers(model).values())
    with comm.ledger.purpose("sync", instead_of="train"):
        coalesced([b for b in buffers if is_averaged(b)], comm.mean)
        coalesced([b for b in buffers if not is_averaged(b)], comm.broadcast)


@torch.no_grad()
def averaged_state(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Comm) -> dict[str, OptimizerState]:
    """A copy of the optimizer's state by name of the parameter, equal on all ranks: the mean of each moment.

    Counters, and what else cannot be averaged, are rank 0's. A parameter that has no state on some rank, because it
    got no gradient there, is left out. Collective.
    """
    states, names = states_by_name(model, optimizer), [name for name, _ in model.named_parameters()]
    with comm.ledger.purpose("sync", instead_of="train"):
        everywhere = comm.min(torch.tensor([name in states for name in names], dtype=torch.uint8)).tolist()
        found = {name: states[name] for name, has in zip(names, everywhere, strict=True) if has}
        tensors = [value for state in found.values() for value in state.values() if isinstance(value, Tensor)]
        coalesced([t for t in tensors if t.dim() and is_averaged(t)], comm.mean)
        coalesced([t for t in tensors if not (t.dim() and is_averaged(t))], comm.broadcast)
        _broadcast_numbers(found, comm)
    return found


def _broadcast_numbers(states: Mapping[str, OptimizerState], comm: Comm) -> None:
    """Give optimizer states the numbers of rank 0, as counters that are no tensors. In place; collective."""
    places = [(state, key) for state in states.values() for key, value in state.items() if type(value) in (int, float)]
    if places:
        numbers = comm.broadcast(torch.tensor([state[key] for state, key in places], dtype=torch.float64))
        for (state, key), number in zip(places, numbers.tolist(), strict=True):
            state[key] = type(state[key])(number)


def averaged_copy(model: nn.Module, comm: Comm, differing: Sequence[str] = ()) -> nn.Module:
    """A copy of a model, equal on all ranks: buffers, and the parameters named in `differing`, are averaged."""
    averaged = usual_copy(model)
    with comm.ledger.purpose("sync", instead_of="train"):
        coalesced([averaged.get_parameter(name) for name in differing], comm.mean)
    average_buffers(averaged, comm)
    return averaged
