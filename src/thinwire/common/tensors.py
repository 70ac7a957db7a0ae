"""Tensors of a module, many tensors as one vector or as bytes, and numbers that tell tensors apart."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (torch's DTensor), in its own memory; another tensor as it is."""
    part: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]
    return part


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once."""
    return dict(model.named_parameters()) | named_persistent_buffers(model)


def named_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are in the model's state_dict; the others are caches that every rank computes for itself."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def num_bytes(tensor: Tensor) -> int:
    """The size of a tensor's data."""
    return tensor.numel() * tensor.element_size()


def flatten(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """A vector with a copy of the elements of all tensors, one after the other; without a dtype, in their own.

    >>> flatten([torch.zeros(2), torch.ones(1, 2)])
    tensor([0., 0., 1., 1.])
    """
    vectors = [t.detach().reshape(-1) for t in tensors]
    return torch.cat(vectors if dtype is None else [v.to(dtype) for v in vectors])


def as_vector(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """All elements one after the other: in the tensors' own memory where they lie so already, else a copy.

    >>> whole = torch.zeros(4)
    >>> as_vector([whole[:1], whole[1:].view(3, 1)]).data_ptr() == whole.data_ptr()
    True
    """
    every = [t.detach().reshape(-1).contiguous() for t in tensors]
    vectors = [v for v in every if v.numel()] or every[:1]
    if any(v.dtype != (dtype or vectors[0].dtype) for v in vectors):
        return flatten(vectors, dtype)
    first = vectors[0]
    begin = at = first.storage_offset()
    for vector in vectors:
        if vector.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or vector.storage_offset() != at:
            return flatten(vectors)
        at += vector.numel()
    return first.as_strided((at - begin,), (1,))


def unflatten(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """What `flatten` joined: views of the vector with the shapes of `like`, and the vector's dtype.

    >>> unflatten(torch.arange(3), [torch.zeros(1), torch.zeros(1, 2)])
    [tensor([0]), tensor([[1, 2]])]
    """
    like = list(like)
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def to_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, as a vector of uint8; not a copy if the tensor is contiguous.

    >>> to_bytes(torch.tensor([1, 256], dtype=torch.int16)).tolist()
    [1, 0, 0, 1]
    """
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor whose bytes these are; a view unless the bytes begin where no element of this dtype may begin.

    >>> from_bytes(torch.tensor([9, 1, 0, 0, 1], dtype=torch.uint8)[1:], torch.int16, (2, 1)).tolist()
    [[1], [256]]
    """
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(tuple(shape))


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's elements, on whatever device and in whatever order of memory they are."""
    return zlib.crc32(to_bytes(tensor.detach().cpu().resolve_conj()).numpy().tobytes())


def fingerprint(tensor: Tensor) -> int:
    """A number that tells tensors apart: their checksum, and their size.

    >>> fingerprint(torch.tensor([1, 2])) == fingerprint(torch.tensor([1, 2])) != fingerprint(torch.tensor([2, 1]))
    True
    """
    return (num_bytes(tensor) % 2**30 << 32) + checksum(tensor)
