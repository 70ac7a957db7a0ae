"""The reference: `formulas` as they are, in portions that stay in a CPU's cache."""

from __future__ import annotations

import torch

from thinwire.kernels import formulas
from thinwire.kernels.passes import Passes

CACHED_ELEMENTS = 2**17  # of a portion; half and twice as many are slower on CPUs with 1–2 MB of cache a core

_passes = Passes(formulas, CACHED_ELEMENTS, torch.int8)
abs_max, quantise, dequantise = _passes.abs_max, _passes.quantise, _passes.dequantise
encode, decode_mean = _passes.encode, _passes.decode_mean
