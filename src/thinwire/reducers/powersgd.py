"""Matrices of low rank, in one round a step."""

from __future__ import annotations

import zlib
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.reducers.base import Named, Reduced, Reducer, State, flatten, in_order, nested, unflatten
from thinwire.reducers.error_feedback import error_feedback


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

    def init(tensors: Named) -> State:
        low, _ = _apart(tensors, rank)
        left = {n: _random_basis(f"left {n}", t.shape[0], rank, t.device) for n, t in low.items()}
        right = {n: _random_basis(f"right {n}", t.numel() // t.shape[0], rank, t.device) for n, t in low.items()}
        return {**nested(left, "left"), **nested(right, "right")}

    def reduce(tensors: Named, state: State, comm: Comm) -> Reduced:
        low, exact = _apart(tensors, rank)
        groups = _of_one_shape(low)
        m = [_stacked([t.detach().reshape(t.shape[0], -1).float() for t in group.values()]) for group in groups]
        a = [_stacked([state[f"left/{name}"] for name in group]) for group in groups]
        v = [_stacked([state[f"right/{name}"] for name in group]) for group in groups]
        p = [x @ right for x, right in zip(m, v, strict=True)]
        q = [x.mT @ left for x, left in zip(m, a, strict=True)]

        sent = {str(i): t for i, t in enumerate([*p, *q, *exact.values()])}
        got = list(unflatten(comm.mean(flatten(sent)), sent).values())  # one round for everything
        mean_p, mean_q, plain = got[: len(p)], got[len(p) : 2 * len(p)], got[2 * len(p) :]

        product = [torch.bmm(*_factors(*each)) for each in zip(mean_p, mean_q, a, v, strict=True)]
        means = {**_shaped(groups, product), **dict(zip(exact, plain, strict=True))}
        left = [_orthonormal(x, old) for x, old in zip(mean_p, a, strict=True)]
        right = [_orthonormal(x, old) for x, old in zip(mean_q, v, strict=True)]

        def error() -> Named:
            lost = [torch.baddbmm(x, *_factors(*each), alpha=-1) for x, *each in zip(m, p, q, a, v, strict=True)]
            nothing = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in exact.items()}
            return in_order({**_shaped(groups, lost), **nothing}, tensors)

        mean = {name: means[name].to(t.dtype) for name, t in tensors.items()}
        return Reduced(mean, error, {**nested(_named(groups, left), "left"), **nested(_named(groups, right), "right")})

    return error_feedback(Reducer(init, reduce))


def _factors(p: Tensor, q: Tensor, a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """P·Vᵀ + A·(Qᵀ − AᵀP·Vᵀ) as one product."""
    return torch.cat([p, a], -1), torch.cat([v, q - v @ (p.mT @ a)], -1).mT


def _orthonormal(x: Tensor, old: Tensor) -> Tensor:
    """An orthonormal basis of x's columns; where they span too little, of the old basis too, not of unit vectors that
    later gradients may never meet."""
    size = x.abs().amax((1, 2), keepdim=True)
    basis: Tensor = torch.linalg.qr(x / torch.where(size > 0, size, 1.0) + 1e-6 * old).Q
    return basis


def pays(tensor: Tensor, rank: int) -> bool:
    """Whether two factors of this rank are smaller than the tensor.

    >>> pays(torch.zeros(64, 3, 3, 3), rank=4), pays(torch.zeros(8, 8), rank=4), pays(torch.zeros(64), rank=4)
    (True, False, False)
    """
    rows = tensor.shape[0] if tensor.dim() > 1 else 0
    return bool(rows) and rank * (rows + tensor.numel() // rows) < tensor.numel()


def _apart(tensors: Named, rank: int) -> tuple[Named, Named]:
    low = {name: t for name, t in tensors.items() if pays(t, rank)}
    return low, {name: t for name, t in tensors.items() if name not in low}


def _random_basis(name: str, height: int, rank: int, device: torch.device) -> Tensor:
    """The same on every rank, without a word; drawn on the CPU because a GPU draws other numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    basis: Tensor = torch.linalg.qr(torch.randn(height, rank, generator=generator)).Q
    return basis.to(device)


def _of_one_shape(tensors: Named) -> list[Named]:
    """Tensors whose matrices have the same shape, together: one batched product instead of many small ones."""
    groups: dict[tuple[int, int], Named] = {}
    for name, t in tensors.items():
        groups.setdefault((t.shape[0], t.numel() // t.shape[0]), {})[name] = t
    return list(groups.values())


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]


def _named(groups: list[Named], stacks: list[Tensor]) -> Named:
    return {name: t for group, stack in zip(groups, stacks, strict=True) for name, t in zip(group, stack, strict=True)}


def _shaped(groups: list[Named], stacks: list[Tensor]) -> Named:
    shapes = {name: t.shape for group in groups for name, t in group.items()}
    return {name: t.reshape(shapes[name]) for name, t in _named(groups, stacks).items()}
