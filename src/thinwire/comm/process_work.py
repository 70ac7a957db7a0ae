"""Handles of operations that torch has started."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.process_groups import peer_errors, wait_for_message


class TorchWork:
    """A torch work handle (None: nothing to do) with the tensor that it fills, which then moves to a device.

    A message between two ranks is given its `group`.
    """

    def __init__(self, work: Any, tensor: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.work, self.group = work, group
        self.tensor = tensor
        self.device = device

    def wait(self) -> Tensor:
        if self.work is not None:
            with peer_errors():
                wait_for_message(self.work, self.group) if self.group else self.work.wait()
        to_gpu = self.device.type == "cuda"  # from pinned memory, which is kept until the copy is done
        return self.tensor.to(self.device, non_blocking=to_gpu)

    def done(self) -> bool:
        return self.work is None or bool(self.work.is_completed())
