"""Matrices of low rank, in one round a step."""

from __future__ import annotations

import zlib
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.common.tensors import flatten, unflatten
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState, ordered_like
from thinwire.reducers.error_feedback import error_feedback
from thinwire.reducers.states import add_prefix


def powersgd(
    rank: Annotated[int, Field(ge=1)] = 4,  # rank of the approximation; lower = fewer bytes, coarser gradient
) -> Reducer:
    """Low-rank approximation of each matrix by power iteration, one exchange per step, with error feedback.

    With orthonormal bases A (left) and V (right) of the last step, each rank sends P = M·V and Q = Mᵀ·A together, and
    out = P·Vᵀ + A·(Qᵀ − AᵀP·Vᵀ): what of M lies in either space. The next bases are orth(P) and orth(Q). All of that
    is linear in M, so sums over ranks are exact; what a rank lost is (1 − AAᵀ)·M·(1 − VVᵀ), and error feedback adds
    it to the next gradient. (The original takes turns: Q waits for orth(P), which needs two rounds a step.)

    A tensor counts as the matrix (first dimension × the others). Where r·(rows + columns) is not less than
    rows·columns it is sent as it is. Wire bytes per rank: 2(n−1)/n·4·(r·(rows + columns) for each matrix, and the
    elements of what is sent as it is).

    Wire: 0.4 bits per element for VGG16 with rank 4 (32·r·(1/rows + 1/columns)); sums on the wire.

    Vogels et al., "PowerSGD", NeurIPS 2019.
    """

    def init(tensors: Named) -> ReducerState:
        low, _ = _split(tensors, rank)
        left = {n: _random_basis(f"left {n}", t.shape[0], rank, t.device) for n, t in low.items()}
        right = {n: _random_basis(f"right {n}", t.numel() // t.shape[0], rank, t.device) for n, t in low.items()}
        return {**add_prefix(left, "left"), **add_prefix(right, "right")}

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        low, exact = _split(tensors, rank)
        return _reduce(_stacks(low, state), exact, tensors, comm)

    return error_feedback(Reducer(init, reduce))


class _Stack(NamedTuple):
    """Tensors whose matrices have the same shape, stacked: one batched product instead of many small ones."""

    shapes: dict[str, torch.Size]  # of the tensors, by name
    m: Tensor  # M: their matrices
    a: Tensor  # A: the left basis of each
    v: Tensor  # V: the right basis of each

    def named(self, stacked: Tensor) -> Named:
        """A result for each matrix, by name."""
        return dict(zip(self.shapes, stacked, strict=True))

    def shaped(self, stacked: Tensor) -> Named:
        """A matrix for each matrix, by name and in the tensor's shape."""
        return {name: t.reshape(self.shapes[name]) for name, t in self.named(stacked).items()}


def _reduce(stacks: list[_Stack], exact: Named, tensors: Named, comm: Comm) -> Reduced:
    # 1. P = M·V and Q = Mᵀ·A, averaged over ranks in one round, together with what is sent as it is
    p = [stack.m @ stack.v for stack in stacks]
    q = [stack.m.mT @ stack.a for stack in stacks]
    sent = [*p, *q, *exact.values()]
    received = unflatten(comm.mean(flatten(sent, torch.float32)), sent)
    mean_p, mean_q, mean_exact = received[: len(p)], received[len(p) : 2 * len(p)], received[2 * len(p) :]

    # 2. out = P·Vᵀ + A·(Qᵀ − AᵀP·Vᵀ)
    means = dict(zip(exact, mean_exact, strict=True))
    for stack, *each in zip(stacks, mean_p, mean_q, strict=True):
        means |= stack.shaped(torch.bmm(*_factors(stack, *each)))

    # 3. the bases of the next step: orth(P) and orth(Q)
    left: Named = {}
    right: Named = {}
    for stack, x, y in zip(stacks, mean_p, mean_q, strict=True):
        left |= stack.named(_orthonormal(x, stack.a))
        right |= stack.named(_orthonormal(y, stack.v))

    def error() -> Named:
        """(1 − AAᵀ)·M·(1 − VVᵀ), from this rank's own P and Q."""
        lost = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in exact.items()}
        for stack, *each in zip(stacks, p, q, strict=True):
            lost |= stack.shaped(torch.baddbmm(stack.m, *_factors(stack, *each), alpha=-1))
        return ordered_like(lost, tensors)

    mean = {name: means[name].to(t.dtype) for name, t in tensors.items()}
    return Reduced(mean, error, {**add_prefix(left, "left"), **add_prefix(right, "right")})


def _factors(stack: _Stack, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """P·Vᵀ + A·(Qᵀ − AᵀP·Vᵀ) as one product: [P A]·[V, Q − V·PᵀA]ᵀ."""
    return torch.cat([p, stack.a], -1), torch.cat([stack.v, q - stack.v @ (p.mT @ stack.a)], -1).mT


def _orthonormal(x: Tensor, old: Tensor) -> Tensor:
    """An orthonormal basis of the columns of x. If they are dependent, the old basis fills the gap."""
    size = x.abs().amax((1, 2), keepdim=True)
    basis: Tensor = torch.linalg.qr(x / torch.where(size > 0, size, 1.0) + 1e-6 * old).Q
    return basis


def saves_bytes(tensor: Tensor, rank: int) -> bool:
    """Whether two factors of this rank are smaller than the tensor.

    >>> [saves_bytes(torch.zeros(shape), rank=4) for shape in ((64, 3, 3, 3), (8, 8), (64,))]
    [True, False, False]
    """
    rows = tensor.shape[0] if tensor.dim() > 1 else 0
    return bool(rows) and rank * (rows + tensor.numel() // rows) < tensor.numel()


def _split(tensors: Named, rank: int) -> tuple[Named, Named]:
    """Those that are sent as matrices of low rank, and those that are sent as they are."""
    low = {name: t for name, t in tensors.items() if saves_bytes(t, rank)}
    return low, {name: t for name, t in tensors.items() if name not in low}


def _random_basis(name: str, height: int, rank: int, device: torch.device) -> Tensor:
    """The same on every rank, without communication; drawn on the CPU because a GPU draws other numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    basis: Tensor = torch.linalg.qr(torch.randn(height, rank, generator=generator)).Q
    return basis.to(device)


def _stacks(tensors: Named, state: ReducerState) -> list[_Stack]:
    by_shape: dict[tuple[int, int], Named] = {}
    for name, t in tensors.items():
        by_shape.setdefault((t.shape[0], t.numel() // t.shape[0]), {})[name] = t
    return [
        _Stack(
            {name: t.shape for name, t in group.items()},
            _stacked([t.detach().reshape(t.shape[0], -1).float() for t in group.values()]),
            _stacked([state[f"left/{name}"] for name in group]),
            _stacked([state[f"right/{name}"] for name in group]),
        )
        for group in by_shape.values()
    ]


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]
