"""Recipe: the settings of training that every strategy uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from thinwire.losses import BatchLoss, Loss
from thinwire.optim import OptimizerFactory
from thinwire.surgery.moments import OptimizerState


@dataclass(frozen=True)
class Recipe:
    """The settings of training that every strategy uses: the arguments of `tw.prepare`, without model and comm."""

    loss: Loss | None  # of (output, targets) or of (model, batch); None: the model returns it
    optimizer: OptimizerFactory  # a factory, because some strategies make parameters in mid-run
    schedule: Callable[[int], float] = lambda step: 1.0  # step → factor of the learning rate
    clip_norm: float | None = None  # largest norm of the gradient; None = not clipped
    accumulate: int = 1  # micro-batches that a batch is computed in; more = less memory, same update
    autocast: bool = False  # whether forward passes compute in bfloat16
    epochs: int | None = None  # in the whole run; for strategies with phases
    compile: bool = False  # whether the model is compiled by torch.compile; of strategies that leave it whole
    optimizer_state: Mapping[str, OptimizerState] = field(default_factory=dict)  # that the first optimizer begins with
    steps: int | None = field(default=None, kw_only=True)  # in the whole run, if it may end in mid-epoch
    own_loop: bool = field(default=False, kw_only=True)  # the caller makes the steps: nothing here learns
    rehearses: bool = field(default=False, kw_only=True)  # nothing is computed and gradients are zeros; on dry comms

    @cached_property
    def batch_loss(self) -> BatchLoss:
        """How the loss of a model on a batch is computed."""
        return BatchLoss(self.loss)
