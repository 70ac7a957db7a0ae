"""torch's DDP as benchmarks compare with it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ddp(model: nn.Module, **more: Any) -> DistributedDataParallel:
    """DDP with its faster settings: gradients are views of what was received, not copies, and buffers are not sent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)  # torch 2.11 has no other name for it
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False, **more)
