"""States as a checkpoint holds them: nested containers as JSON and tensors; states of random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.common.dtypes import as_reals
from thinwire.errors import RunError, one_line

Tree = Any  # dicts, lists, tuples, tensors, numbers, strings, booleans, None


def pack(tree: Tree, tensors: dict[str, Tensor], path: str = "") -> Tree:
    """A tree as JSON. Tensors are moved to `tensors`, by their path; types that JSON lacks are marked with $."""
    match tree:
        case Tensor():
            while path in tensors:  # as in {"a/b": …, "a": {"b": …}}
                path += "'"
            tensors[path] = as_reals(tree.detach()).cpu().contiguous().clone()
            return {"$complex" if tree.is_complex() else "$tensor": path}
        case dict():
            values = [(key, pack(value, tensors, f"{path}/{key}")) for key, value in tree.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in tree):
                return dict(values)
            return {"$items": [[pack(key, tensors, f"{path}/{key}"), value] for key, value in values]}
        case tuple():
            return {"$tuple": [pack(value, tensors, f"{path}/{i}") for i, value in enumerate(tree)]}
        case list():
            return [pack(value, tensors, f"{path}/{i}") for i, value in enumerate(tree)]
        case None | bool() | int() | float() | str():
            return tree
    raise TypeError(f"a checkpoint cannot hold {type(tree).__name__} (at {path or 'its root'})")


def unpack(tree: Tree, tensors: dict[str, Tensor]) -> Tree:
    """The tree that was given to `pack`."""
    match tree:
        case {"$tensor": path}:
            return tensors[path]
        case {"$complex": path}:
            return torch.view_as_complex(tensors[path])
        case {"$items": items}:
            return {unpack(key, tensors): unpack(value, tensors) for key, value in items}
        case {"$tuple": values}:
            return tuple(unpack(value, tensors) for value in values)
        case dict():
            return {key: unpack(value, tensors) for key, value in tree.items()}
        case list():
            return [unpack(value, tensors) for value in tree]
    return tree


def random_state() -> dict[str, Any]:
    """The state of every random generator that training may use."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": (version, tuple(internal), gauss),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            cached,
        ),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Continue with the random numbers of a saved state; RunError if it is none."""
    try:
        _set_random_state(state)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise RunError(
            f"the saved state of random generators is damaged ({type(error).__name__}: {one_line(str(error))})"
        ) from error


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    if not 0 <= position <= len(keys):  # numpy would read beyond them
        raise ValueError(f"position {position} of {len(keys)} numbers")
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
