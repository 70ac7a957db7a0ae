"""What each stage costs in training, and a warning if one makes the others wait."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.strategies.stages.cut_model import Stage
from thinwire.strategies.stages.windows import LossWindow
from thinwire.surgery.costs import flops

UNEQUAL = 4.0  # a stage that costs more than this times the mean of the others makes them wait


class StageCosts(NamedTuple):
    """Floating-point operations of all stages in training, for one sample."""

    flops_per_sample: float
    backprop_flops_per_sample: float  # of backpropagation through the same blocks, without heads
    shares: list[float]  # of each stage in the operations

    @property
    def dearest(self) -> int:
        """The stage with the most operations."""
        return self.shares.index(max(self.shares))

    @property
    def are_unequal(self) -> bool:
        """Whether the dearest stage makes the others wait."""
        largest, num_others = max(self.shares), len(self.shares) - 1
        return num_others > 0 and largest > UNEQUAL * (1 - largest) / num_others


def add_up_costs(training_flops: int, backprop_flops: int, num_samples: int, stages: Comm) -> StageCosts:
    """The costs of all stages from those of this rank's stage, for an example of some samples. Collective."""
    own = torch.tensor([training_flops, backprop_flops], dtype=torch.float64)
    with stages.ledger.purpose("start"):
        per_sample = torch.stack(stages.all_gather(own)) / num_samples
    total, backprop_total = per_sample.sum(0).tolist()
    return StageCosts(total, backprop_total, (per_sample[:, 0] / max(1.0, total)).tolist())


def flops_with_local_losses(stage: Stage, window: LossWindow, block: int, z_in: Tensor, z: Tensor) -> int:
    """Operations of a block and its head in training with local losses, for an example of its input and output."""
    trains_and_crosses = window.training_and_crossing(block) is not None
    total = flops(stage.block, z_in, input_gradient=trains_and_crosses)
    if stage.head is not None:
        total += flops(stage.head, z, input_gradient=True)
    num_crossing = len(window.crossing(block)) - trains_and_crosses  # backward passes without gradients of weights
    if num_crossing:
        forward = flops(stage.block, z_in, input_gradient=False, weights=False)
        total += num_crossing * (flops(stage.block, z_in, input_gradient=True, weights=False) - forward)
    return total
