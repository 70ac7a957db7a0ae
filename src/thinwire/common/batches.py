"""Batches of any structure: tensors in tuples, lists, dicts and other mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """A batch with a function applied to each of its tensors, which may be in tuples, lists and mappings.

    Containers of other classes, which may need other arguments to be made, are copied and filled anew; tuples of other
    classes are left as they are.

    >>> map_tensors((torch.ones(2), [torch.zeros(1), "label"]), len)
    (2, [1, 'label'])
    """
    match batch:
        case Tensor():
            return function(batch)
        case MutableMapping():
            mapping = copy.copy(batch)
            for key, value in batch.items():
                mapping[key] = map_tensors(value, function)
            return mapping
        case list():
            items = copy.copy(batch)
            items[:] = [map_tensors(value, function) for value in batch]
            return items
        case tuple() if type(batch) is tuple or hasattr(batch, "n_fields"):  # or what x.max(1) returns
            return type(batch)(map_tensors(value, function) for value in batch)
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(map_tensors(value, function) for value in batch))
    return batch


def leaves(batch: Any) -> list[Any]:
    """Everything in a batch that is not a container, in order.

    >>> leaves({"a": (1, [2, "text"]), "b": None})
    [1, 2, 'text', None]
    """
    match batch:
        case Mapping():
            return [leaf for value in batch.values() for leaf in leaves(value)]
        case list() | tuple():
            return [leaf for value in batch for leaf in leaves(value)]
    return [batch]


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch, in order."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def num_samples_of(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor.

    >>> num_samples_of({"ids": torch.zeros(4, 7), "labels": torch.zeros(4)})
    4
    """
    first = next((tensor for tensor in tensors_of(batch) if tensor.dim()), None)
    if first is None:
        raise UsageError(f"a batch without a tensor, {describe(batch)}; the first dimension of a tensor counts samples")
    return len(first)


def split_batch(batch: Any, number: int) -> list[Any]:
    """A batch as so many batches of about equal size: each of its tensors is split along the first dimension.

    >>> [part["ids"].tolist() for part in split_batch({"ids": torch.arange(5)}, 2)]
    [[0, 1, 2], [3, 4]]
    """
    found = leaves(batch)
    others = sorted({type(leaf).__name__ for leaf in found if not isinstance(leaf, Tensor) and leaf is not None})
    sizes = list(dict.fromkeys(len(t) if t.dim() else 0 for t in tensors_of(batch)))
    if others or len(sizes) != 1:
        what = f"{', '.join(others)} in it" if others else f"tensors of {' and '.join(map(str, sizes))} samples in it"
        raise UsageError(
            f"accumulate={number}, but a batch has {what}, and cannot be split; give tensors whose first dimension "
            "counts the samples, or leave accumulate out"
        )

    def part(index: int) -> Any:
        return map_tensors(batch, lambda tensor: tensor.tensor_split(number)[index])

    return [part(index) for index in range(number)]


def describe_tensors(batch: Any) -> Any:
    """The structure of a batch as JSON, with shapes and dtypes of its tensors, for `zeros_of` on another rank."""
    match batch:
        case Tensor():
            return {"shape": list(batch.shape), "dtype": str(batch.dtype).removeprefix("torch.")}
        case Mapping():
            return {"dict": {key: describe_tensors(value) for key, value in batch.items()}}
        case list() | tuple():
            return {"list": [describe_tensors(value) for value in batch]}
    return {"value": batch if isinstance(batch, str | int | float | bool) else None}


def zeros_of(described: Any, device: torch.device) -> Any:
    """A batch of zeros with the structure that `describe_tensors` returned.

    >>> zeros_of(describe_tensors({"ids": torch.ones(1, 2), "name": "a"}), torch.device("cpu"))
    {'ids': tensor([[0., 0.]]), 'name': 'a'}
    """
    match described:
        case {"shape": shape, "dtype": dtype}:
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        case {"dict": items}:
            return {key: zeros_of(value, device) for key, value in items.items()}
        case {"list": items}:
            return [zeros_of(value, device) for value in items]
    return described["value"]


def describe(batch: Any) -> str:
    """A batch in words, for an error message.

    >>> describe((1, "text")), describe({"x": 1})
    ('a tuple of int, str', 'a dict of x')
    """
    what = f"a {type(batch).__name__}"
    match batch:
        case Mapping():
            return f"{what} of {', '.join(map(str, batch))}" if batch else what
        case list() | tuple():
            return f"{what} of {', '.join(type(part).__name__ for part in batch)}" if batch else what
    return what
