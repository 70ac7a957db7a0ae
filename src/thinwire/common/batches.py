"""Batches of any structure: tensors in tuples, lists, dicts and other mappings."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from thinwire.errors import UsageError


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """A batch with a function applied to each of its tensors, which may be in tuples, lists and mappings.

    Containers of other classes, which may need other arguments to be made, are copied and filled anew; tuples of other
    classes are left as they are.

    >>> import torch
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

    >>> import torch
    >>> num_samples_of({"ids": torch.zeros(4, 7), "labels": torch.zeros(4)})
    4
    """
    first = next((tensor for tensor in tensors_of(batch) if tensor.dim()), None)
    if first is None:
        raise UsageError(f"a batch without a tensor, {describe(batch)}; the first dimension of a tensor counts samples")
    return len(first)


def split_batch(batch: Any, number: int) -> list[Any]:
    """A batch as so many batches of about equal size: each of its tensors is split along the first dimension.

    >>> import torch
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


def plain_of(batch: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """The structure of a batch in plain dicts and lists, with a function of each tensor; for a file or a message.

    Mappings and named tuples of any class become dicts. What is neither a tensor nor a number or text becomes None.

    >>> import torch
    >>> plain_of({"ids": torch.zeros(4, 7), "name": "a"}, lambda tensor: list(tensor.shape))
    {'dict': {'ids': [4, 7], 'name': {'value': 'a'}}}
    """

    def parts(items: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: plain_of(value, of_tensor) for key, value in items.items()}

    match batch:
        case Tensor():
            return of_tensor(batch)
        case Mapping():
            return {"dict": parts(batch)}
        case tuple() if hasattr(batch, "_fields"):
            return {"fields": parts(dict(zip(batch._fields, batch, strict=True)))}
        case list() | tuple():
            kind = "list" if isinstance(batch, list) else "tuple"
            return {kind: [plain_of(value, of_tensor) for value in batch]}
    return {"value": batch if isinstance(batch, str | int | float | bool) else None}


def batch_of(plain: Any, to_tensor: Callable[[Any], Tensor]) -> Any:
    """A batch with the structure that `plain_of` returned. Mappings also have their keys as attributes.

    >>> import torch
    >>> batch = batch_of({"dict": {"ids": [4, 7], "name": {"value": "a"}}}, torch.zeros)
    >>> batch["ids"].shape, batch.name
    (torch.Size([4, 7]), 'a')
    """
    match plain:
        case {"dict": items}:
            return _Mapping((key, batch_of(value, to_tensor)) for key, value in items.items())
        case {"fields": items}:
            return namedtuple("Batch", items)(*(batch_of(value, to_tensor) for value in items.values()))
        case {"tuple": items}:
            return tuple(batch_of(value, to_tensor) for value in items)
        case {"list": items}:
            return [batch_of(value, to_tensor) for value in items]
        case {"value": value}:
            return value
    return to_tensor(plain)


class _Mapping(dict[Any, Any]):
    """In place of a mapping of any class: some, as those of tokenizers, have their keys as attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


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
