"""`formulas` through torch.compile: one pass over memory each.

They need a C++ compiler, and some seconds when they are first called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config as fx_config

from thinwire.kernels import formulas
from thinwire.kernels.passes import Passes


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any) -> None:
        if args[0].shape[-2] == 1:  # a single block is not worth a compilation of its own
            return function(*args)
        # Views begin anywhere: sizes that happen to be equal must not be taken for the same. Bits and levels are
        # compiled in: as variables they would be computed with anew for every few elements, which doubles the time. So
        # there are as many variants as bits and levels, with and without random numbers, errors and ranks.
        constants = {"specialize_int": True, "specialize_float": True, "recompile_limit": 100}
        with fx_config.patch(use_duck_shape=False), dynamo_config.patch(constants):  # type: ignore[attr-defined]
            return compiled(*args)

    return call


NAMES = ("abs_max", "two_bit_steps", "quantise", "dequantise", "encode", "decode_mean")
_passes = Passes(SimpleNamespace(**{name: _compiled(getattr(formulas, name)) for name in NAMES}), 0, torch.int32)
abs_max, quantise, dequantise = _passes.abs_max, _passes.quantise, _passes.dequantise
encode, decode_mean = _passes.encode, _passes.decode_mean
