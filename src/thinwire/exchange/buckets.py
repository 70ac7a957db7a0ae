"""Buckets: which parameters' gradients are reduced together, and how gradients lie in DDP's own buckets.

DDP regroups its buckets after the first step, and again after a resume. Anything that depended on them (the order of a
ring's sums, a block of elements that shares a scale) would differ between a resumed run and one that was never stopped.
So the buckets here are fixed by the model and bucket_mb alone, and DDP only tells when gradients are ready.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from thinwire.comm.process import GradBucket
from thinwire.common.packing import fill_groups
from thinwire.common.tensors import num_bytes
from thinwire.errors import UsageError
from thinwire.reducers.base import Reducer, ReducerState

FIRST_BUCKET_BYTES = 2**20  # small, so that the network is busy early in the backward pass


def make_buckets(parameters: dict[str, nn.Parameter], bucket_mb: float) -> list[list[str]]:
    """Trainable parameters in the order their gradients come (last layer first), in buckets of about one size."""
    sizes = {name: num_bytes(p) for name, p in reversed(parameters.items()) if p.requires_grad}
    capacity = bucket_mb * 2**20
    return fill_groups(sizes, capacity, first_capacity=min(FIRST_BUCKET_BYTES, capacity))


def init_states(reducer: Reducer, parameters: dict[str, nn.Parameter], buckets: list[list[str]]) -> list[ReducerState]:
    """The reducer's first state for each bucket."""
    return [reducer.init({name: parameters[name] for name in names}) for names in buckets]


def ddp_gradients(bucket: GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of a DDP bucket, and their gradients as views of its buffer.

    `GradBucket.gradients` is not used: it reads complex gradients, which lie there as pairs, from half of their place,
    and the elements of dense tensors that are not contiguous in another order.
    """
    flat, parameters = bucket.buffer(), bucket.parameters()
    if parameters[0].is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    for part, parameter in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True):
        shape, stride = parameter.shape, parameter.stride()
        strided = not parameter.is_contiguous() and torch.empty_like(parameter, device="meta").stride() == stride
        yield parameter, part.as_strided(shape, stride) if strided else part.view(shape)


def missing_gradient_error() -> UsageError:
    """The error for a step in which some parameter of a bucket got no gradient."""
    return UsageError(
        "some parameters got no gradient in the last step, and the other ranks wait for it. Use all of them in "
        "each step, set requires_grad=False, or allow it, as data_parallel(unused_parameters=True) does"
    )
