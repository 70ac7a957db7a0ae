"""What every strategy does between two exchanges: forward pass, backward pass, optimizer step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.common.dtypes import refuse_sparse
from thinwire.data import Batch, to_device
from thinwire.errors import RunError, UsageError
from thinwire.exchange.buckets import missing_gradient_error
from thinwire.exchange.gradients import GradientExchange
from thinwire.optim import OptimizerFactory

CHECK_EVERY_STEPS = 20  # how often losses and gradients on a GPU are checked; each check waits for the GPU
WARMUP_START_LR = 1e-5  # where a learning-rate warm-up begins
Loss = Callable[[Any, Tensor], Tensor]  # (model output, targets) → mean over the batch


@dataclass(frozen=True)
class Recipe:
    """The settings of training that every strategy uses: the arguments of `tw.prepare`, without model and comm."""

    loss: Loss
    optimizer: OptimizerFactory  # a factory, because some strategies make parameters in mid-run
    schedule: Callable[[int], float] = lambda step: 1.0  # step → factor of the learning rate
    clip_norm: float | None = None  # largest norm of the gradient; None = not clipped
    accumulate: int = 1  # micro-batches that a batch is computed in; more = less memory, same update
    autocast: bool = False  # whether forward passes compute in bfloat16
    epochs: int | None = None  # in the whole run; for strategies with phases


class Learner:
    """A model and its optimizer.

    `optimizer_replaced_by` names the strategy, if it makes new optimizers in mid-run. What others set in an optimizer,
    as a learning rate, would then be lost, so it is refused.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, optimizer_replaced_by: str = "") -> None:
        self.model = model
        self.recipe = recipe
        self.optimizer_replaced_by = optimizer_replaced_by
        self.num_steps = 0
        self.initial_lrs: list[float] = []  # of the optimizer's parameter groups, when it was made
        self.new_optimizer()
        self.loss = torch.zeros(())  # of the last step
        self._unchecked: list[Tensor] = []  # (loss, norm of the gradient) of steps that are not yet checked

    def new_optimizer(self, states: Mapping[str, dict[str, Any]] | None = None) -> None:
        """Make an optimizer for the model's present parameters. `states`: its state for some of them, by name."""
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trainable:
            raise UsageError("the model has no parameter to train; set requires_grad on at least one")
        self._refuse_lost_lr()
        self.optimizer = self.recipe.optimizer(list(trainable.values()))
        self.initial_lrs = [group["lr"] for group in self.optimizer.param_groups]
        own = {id(p) for p in self.model.parameters()}
        if any(id(p) not in own for group in self.optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer factory made an optimizer with parameters that are not the model's, and ranks would not "
                "average those; use its argument: lambda parameters: torch.optim.SGD(parameters, 0.1). If the loss "
                "has parameters, make them part of the model"
            )
        if self.optimizer_replaced_by and _has_scheduler(self.optimizer):
            raise UsageError(
                f"{self.optimizer_replaced_by}: the optimizer factory makes a learning-rate scheduler, but this "
                "strategy makes a new optimizer in mid-run, and the scheduler would start again; give prepare a "
                "schedule instead, as schedule=lambda step: 0.99**step"
            )
        for name, state in (states or {}).items():
            if state and name in trainable:
                self.optimizer.state[trainable[name]] = state

    def _refuse_lost_lr(self) -> None:
        """Raise UsageError if the learning rate was changed in an optimizer that is now to be replaced."""
        now = [group["lr"] for group in self.optimizer.param_groups] if self.initial_lrs else []
        if self.optimizer_replaced_by and now != self.initial_lrs:
            strategy = self.optimizer_replaced_by
            raise UsageError(
                f"{strategy}: the optimizer's learning rate is {now[0]} now, but it was made with "
                f"{self.initial_lrs[0]}; {strategy} makes a new optimizer, and the change would be lost. Give prepare "
                "a schedule instead, as schedule=lambda step: 0.99**step"
            )

    def release_model(self) -> None:
        """Free the memory of model and optimizer state. Set another model and call `new_optimizer` to train again."""
        self._refuse_lost_lr()
        self.initial_lrs = []
        self.model = nn.Module()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()

    def backward(self, batch: Batch, exchange: GradientExchange, exchanging: bool = True) -> Tensor:
        """Compute the gradients of the mean loss over the batch, and exchange them or not; returns the loss."""
        self.zero_grad()
        device = next(self.model.parameters()).device
        inputs, targets = to_device(batch, device)
        micro_batches = list(zip(self.micro_batches(inputs), self.micro_batches(targets), strict=True))
        losses = []
        try:
            for i, (x, y) in enumerate(micro_batches, 1):
                with nullcontext() if exchanging and i == len(micro_batches) else exchange.accumulating():
                    with torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.autocast):
                        loss = self.recipe.loss(exchange.forward(x), y) * (len(x) / len(inputs))
                    loss.backward()
                losses.append(loss.detach())
        except RuntimeError as error:
            self._refuse_sparse()
            unfinished = "Expected to have finished reduction" in str(error)  # how DDP reports it, one step late
            raise exchange.error or (missing_gradient_error() if unfinished else error) from None
        if exchanging:
            exchange.finish()
        self.loss = torch.stack(losses).sum()
        return self.loss

    def zero_grad(self) -> None:
        """Drop all gradients, also those that a backward pass outside of thinwire left (as in a GAN)."""
        self.model.zero_grad()

    def update(self, lr_warmup: float = 1.0, total_norm: Callable[[Tensor], Tensor] = lambda norm: norm) -> None:
        """Check and clip the gradients, and take an optimizer step.

        `lr_warmup` goes from 0 (WARMUP_START_LR) to 1 (the learning rate of the schedule). `total_norm` computes the
        norm of the whole model's gradient from the norm of the part on this rank.
        """
        self._refuse_sparse()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for p in parameters:
            if p.grad is not None and p.grad.is_conj():  # only marked as conjugated, which torch cannot clip
                p.grad = p.grad.resolve_conj()
        gradients = [p.grad for p in parameters if p.grad is not None]
        wide = [g.float() if g.dtype == torch.float16 else g for g in gradients]  # the norm may exceed float16
        norm = total_norm(nn.utils.get_total_norm(wide))
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_norm, norm)
        self._check_finite(norm)
        with self._scaled_lr(self.recipe.schedule(self.num_steps), lr_warmup):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    @contextmanager
    def _scaled_lr(self, factor: float, lr_warmup: float) -> Iterator[None]:
        """Inside, learning rates are scaled; afterwards they are what torch's scheduler or the user set."""
        unscaled = [(group, group["lr"]) for group in self.optimizer.param_groups]
        for group, lr in unscaled:
            group["lr"] = lr_warmup * lr * factor + (1 - lr_warmup) * min(lr * factor, WARMUP_START_LR)
        try:
            yield
        finally:
            for group, lr in unscaled:
                group["lr"] = lr

    def _refuse_sparse(self) -> None:
        """Raise an error with the parameter's name; those of DDP and of torch's norm do not name the cause."""
        for name, p in self.model.named_parameters():
            refuse_sparse(p.grad, name)

    def _check_finite(self, norm: Tensor) -> None:
        """Raise RunError if a loss or a gradient is not finite: at once on a CPU, every few steps on a GPU."""
        self._unchecked.append(torch.stack([self.loss.float(), norm.float()]))
        if norm.is_cuda and len(self._unchecked) < CHECK_EVERY_STEPS:
            return
        unchecked = torch.stack(self._unchecked).cpu()
        self._unchecked.clear()
        if not unchecked.isfinite().all():
            first = int((~unchecked.isfinite().all(1)).nonzero()[0])
            loss = unchecked[first, 0]
            step = self.num_steps + 2 - len(unchecked) + first
            raise not_finite_error(step, None if loss.isfinite() else loss.item())

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would train into the caller's tensors
        self.num_steps = state["num_steps"]

    def micro_batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split a batch into `accumulate` micro-batches of at least two samples: BatchNorm needs two."""
        return tensor.tensor_split(max(1, min(self.recipe.accumulate, len(tensor) // 2)))


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one of torch's schedulers was made for an optimizer: it stores the first learning rate there."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def not_finite_error(step: int, loss: float | None) -> RunError:
    """The error for a step whose loss is not finite, or, if loss is None, whose gradient is not."""
    what = "the gradient is not finite" if loss is None else f"the loss is {loss}"
    return RunError(
        f"{what} at step {step}; try a lower --lr, a warm-up (--schedule 'cosine(warmup_epochs=1)') or --clip-norm 1"
    )
