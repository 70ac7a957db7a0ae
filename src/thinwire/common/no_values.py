"""Tensors without values: code that asks meta tensors for a number gets a stand-in, so that it can be rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

YES = {Tensor.__bool__, torch.equal, Tensor.equal}
ONES = {Tensor.__int__, Tensor.__index__}
FALLING = {Tensor.item, Tensor.__float__}
REAL = {Tensor.cpu, Tensor.numpy, Tensor.tolist}


class NoValues(TorchFunctionMode):
    """Inside, questions to meta tensors are answered: true, 1, or a number that falls each time, as a loss would.

    >>> with NoValues():
    ...     bool(torch.ones((), device="meta")), torch.zeros(2, device="meta").tolist()
    (True, [0.0, 0.0])
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = 1.0

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.is_meta:
            if function in YES:
                return True
            if function in ONES:
                return 1
            if function in FALLING:
                self.last /= 2
                is_whole = function is Tensor.item and not given.is_floating_point()
                return 1 if is_whole else self.last
            if function in REAL:
                real = torch.zeros(given.shape, dtype=given.dtype)
                return real if function is Tensor.cpu else function(real)
        return function(*args, **(kwargs or {}))
