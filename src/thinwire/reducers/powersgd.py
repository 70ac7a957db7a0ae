"""Matrices of low rank, in one round a step."""

from __future__ import annotations

import zlib
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from thinwire import kernels
from thinwire.comm.base import Comm
from thinwire.reducers.base import Named, Reduced, Reducer, ReducerState
from thinwire.reducers.matrix_layout import Layout, join, layout_of, split_rows

FILL = 1e-4  # share of the old basis in a new one: it fills the gap where columns are dependent
DEPENDENT = 1e-5  # if a column has less than this of its own, the old basis stays
LARGEST = torch.finfo(torch.float32).max / 8  # larger sums of what was received might give an infinite result


def powersgd(
    rank: Annotated[int, Field(ge=1)] = 4,  # rank of the approximation; lower = fewer bytes, coarser gradient
) -> Reducer:
    """Low-rank approximation of each matrix by power iteration, one exchange per step, with error feedback.

    With orthonormal bases A (left) and V (right) of the last step, each rank sends P = M·V and Q = Mᵀ·A together, and
    out = A·Qᵀ + (P − A·AᵀP)·Vᵀ: what of M lies in either space. The next bases are orth(P) and orth(Q). All of that
    is linear in M, so sums over ranks are exact; what a rank lost is (1 − AAᵀ)·M·(1 − VVᵀ), and error feedback adds
    it to the next gradient. (The original takes turns: Q waits for orth(P), which needs two rounds a step.)

    A tensor counts as the matrix (first dimension × the others). Where r·(rows + columns) is not less than
    rows·columns it is sent as it is. Wire bytes per rank: 2(n−1)/n·4·(r·(rows + columns) for each matrix, and the
    elements of what is sent as it is). A step whose result is not finite changes neither residuals nor bases.

    Wire: 0.4 bits per element for VGG16 with rank 4 (32·r·(1/rows + 1/columns)); sums on the wire.

    Vogels et al., "PowerSGD", NeurIPS 2019.
    """

    def init(tensors: Named) -> ReducerState:
        layout = layout_of(tensors, rank)
        bases = [_random_basis(key, place.shape[0], rank) for key, place in layout.basis_places.items()]
        device = next((t.device for t in tensors.values()), None)
        if device is not None and device.type == "cuda":
            torch.linalg.cholesky_ex(torch.eye(1, device=device))  # loads torch's solvers: not in two lanes at once
        flat_bases = torch.cat([torch.empty(0), *(basis.mT.reshape(-1) for basis in bases)]).to(device)
        return _state(torch.zeros(layout.num_elements, device=device), flat_bases, layout)

    def reduce(tensors: Named, state: ReducerState, comm: Comm) -> Reduced:
        return _reduce(tensors, state, layout_of(tensors, rank), comm)

    return Reducer(init, reduce, keeps_errors=True)


def _reduce(tensors: Named, state: ReducerState, layout: Layout, comm: Comm) -> Reduced:
    residual = join([state[f"residual/{name}"] for name in layout.places], layout.places.values())
    bases = join([state[f"inner/{key}"] for key in layout.basis_places], layout.basis_places.values())
    m = _sums(tensors, residual, layout)  # M = gradient + residual, of all tensors in one vector

    # 1. P = M·V and Q = Mᵀ·A, averaged over ranks in one round, together with what is sent as it is
    sent = m.new_empty(layout.num_factors + layout.num_exact)
    own, exact = sent.tensor_split([layout.num_factors])
    for matrix, a, v, p, q in zip(layout.matrices(m), *layout.factors(bases), *layout.factors(own), strict=True):
        torch.bmm(v, matrix.mT, out=p)  # all factors are transposed
        torch.bmm(a, matrix, out=q)
    exact.copy_(layout.exact(m))
    exchange = comm.start_mean(sent)

    # 2. meanwhile, what this rank loses, in the place of M: M − (A·Qᵀ + (P − A·AᵀP)·Vᵀ)
    for matrix, left, right in zip(layout.matrices(m), *_sides(own, bases, layout), strict=True):
        matrix.baddbmm_(left.mT, right, alpha=-1)
    layout.exact(m).zero_()

    # 3. the mean: A·Qᵀ + (P − A·AᵀP)·Vᵀ of what was received
    received = exchange.wait()
    finite = received.abs().sum() < LARGEST
    shared, exact = torch.where(finite, received, torch.nan).tensor_split([layout.num_factors])
    out = torch.empty_like(m)
    for matrix, left, right in zip(layout.matrices(out), *_sides(shared, bases, layout), strict=True):
        torch.bmm(left.mT, right, out=matrix)
    layout.exact(out).copy_(exact)
    mean, finite = _as_types_of(tensors, layout.named(out), layout.named(m), finite)

    # 4. the bases of the next step: orth(P) and orth(Q)
    new_bases = _orthonormal(shared, bases, layout)
    new_state = _state(_if(finite, m, residual), _if(finite, new_bases, bases), layout)

    def error() -> Named:
        return {name: new_state[f"residual/{name}"] - state[f"residual/{name}"] for name in tensors}

    return Reduced(mean, error, new_state)


def _state(residual: Tensor, bases: Tensor, layout: Layout) -> ReducerState:
    """What is kept, by name: views of two vectors."""
    by_name = {f"residual/{name}": t for name, t in layout.named(residual).items()}
    return by_name | {f"inner/{key}": place.view(bases) for key, place in layout.basis_places.items()}


def _sums(tensors: Named, residual: Tensor, layout: Layout) -> Tensor:
    """Gradient + residual of all tensors, in one vector."""
    given = [tensors[name].detach() for name in layout.places]
    if residual.is_cuda:  # few kernels
        sums = residual.clone()
        torch._foreach_add_(list(layout.named(sums).values()), given)
        return sums
    sums = torch.empty_like(residual)  # one pass over memory
    for t, e, out in zip(given, layout.named(residual).values(), layout.named(sums).values(), strict=True):
        torch.add(t, e, out=out)
    return sums


def _sides(factors: Tensor, bases: Tensor, layout: Layout) -> tuple[list[Tensor], list[Tensor]]:
    """A·Qᵀ + (P − A·AᵀP)·Vᵀ as one product for each stack: of [A, P − A·AᵀP] and [Q, V], transposed."""
    p, q = factors.tensor_split([layout.num_left])
    a, v = bases.tensor_split([layout.num_left])
    rest = torch.empty_like(p)
    by_length = [split_rows(t, layout.left_lengths, layout.rank) for t in (p, a, rest)]
    for left, basis, out in zip(*by_length, strict=True):
        torch.baddbmm(left, left @ basis.mT, basis, alpha=-1, out=out)
    return layout.factors(layout.paired([a, q], [rest, v]))


def _orthonormal(factors: Tensor, bases: Tensor, layout: Layout) -> Tensor:
    """Orthonormal bases of the columns of P and Q; where they are dependent, the old basis fills the gap.

    X = P/|P| + FILL·A, L·Lᵀ = XᵀX (Cholesky), and the new basis is X·L⁻ᵀ. In float64, because the condition of XᵀX is
    the square of X's, which FILL limits to about 10⁴. All matrices XᵀX have r × r elements, so a few operations do for
    all of them. X is never computed: it is a mix of P and A, and so is the new basis.
    """
    lengths, rank = layout.left_lengths + layout.right_lengths, layout.rank
    counts = [count for count, _ in lengths]
    both = split_rows(layout.paired([factors], [bases]).double(), lengths, 2 * rank)  # [P A]ᵀ
    products = factors.new_empty(sum(counts), 2 * rank, 2 * rank, dtype=torch.float64)  # [P A]ᵀ·[P A]
    for x, out in zip(both, products.split(counts), strict=True):
        torch.bmm(x, x.mT, out=out)
    size = products.diagonal(dim1=1, dim2=2)[:, :rank].sum(1).sqrt()
    one = torch.eye(rank, dtype=torch.float64, device=factors.device).expand(len(products), -1, -1)
    mix = torch.cat([one / torch.where(size > 0, size, 1.0)[:, None, None], FILL * one], 2)
    cholesky, failed = torch.linalg.cholesky_ex(mix @ products @ mix.mT)
    mix = torch.linalg.solve_triangular(cholesky, mix, upper=False)
    independent = (failed == 0) & (cholesky.diagonal(dim1=1, dim2=2).amin(1) > DEPENDENT)
    mix = torch.where(independent[:, None, None], mix, torch.cat([torch.zeros_like(one), one], 2))
    new = torch.empty_like(bases, dtype=torch.float64)
    for x, change, out in zip(both, mix.split(counts), split_rows(new, lengths, rank), strict=True):
        torch.bmm(change, x, out=out)
    return new.float()


def _as_types_of(tensors: Named, out: Named, lost: Named, finite: Tensor) -> tuple[Named, Tensor]:
    """The result in the types of the tensors, and whether it is finite. What this rounds off is added to `lost`."""
    mean = {name: out[name].to(t.dtype) for name, t in tensors.items()}
    for name, t in tensors.items():
        if t.dtype != torch.float32:
            finite = finite & kernels.all_finite(mean[name])
            lost[name] += out[name] - mean[name].float()
    return mean, finite


def _if(finite: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new values, or the old ones where the step does not count; the host does not wait for a GPU to say so."""
    if finite.is_cuda:
        return torch.where(finite, new, old, out=new)
    return new if finite else old


def _random_basis(key: str, height: int, rank: int) -> Tensor:
    """The same on every rank, without communication; drawn on the CPU because a GPU draws other numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.replace("/", " ", 1).encode()))
    basis: Tensor = torch.linalg.qr(torch.randn(height, rank, generator=generator)).Q
    return basis
