"""What every strategy does between two exchanges: forward pass, backward pass, optimizer step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.common.batches import num_samples_of, split_batch
from thinwire.common.dtypes import bfloat16_autocast, refuse_sparse
from thinwire.common.messages import say
from thinwire.data import Batch, to_device
from thinwire.errors import UsageError
from thinwire.exchange.buckets import missing_gradient_error
from thinwire.exchange.gradients import GradientExchange
from thinwire.losses import CountedCalls, LossValue, channels_last
from thinwire.optim import learning_rates, refuse_changed_lr, refuse_scheduler, scaled_lr
from thinwire.strategies.clipping import are_alike, clip_gradients, gradient_norm
from thinwire.strategies.finite import FiniteCheck
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.rehearsal import rehearse_backward, rehearse_update
from thinwire.surgery import memory_format
from thinwire.surgery.memory_format import in_order_of
from thinwire.surgery.moments import OptimizerState

IMPLEMENTATION = ("foreach", "fused")  # settings of an optimizer that do not change what it computes


class Learner:
    """A model and its optimizer.

    `optimizer_replaced_by` names the strategy, if it makes new optimizers in mid-run. What others set in an optimizer,
    as a learning rate, would then be lost, so it is refused.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, optimizer_replaced_by: str = "") -> None:
        self.model, self.recipe, self.optimizer_replaced_by = model, recipe, optimizer_replaced_by
        self.num_steps = 0
        self.initial_lrs: list[float] = []  # of the optimizer's parameter groups, when it was made
        self._allows_channels_last = True
        self._has_run = False  # whether the model's code has computed a step, so that it can
        self.new_optimizer(recipe.optimizer_state)
        self.loss = torch.zeros(())  # of the last step
        self.loss_parts: dict[str, Tensor] = {}  # further numbers that the loss returned in the last step
        self._autocast = bfloat16_autocast(self.device, recipe.autocast)
        self._finite_check = FiniteCheck()

    def new_optimizer(self, states: Mapping[str, OptimizerState] | None = None) -> None:
        """Make an optimizer for the model's present parameters. `states`: its state for some of them, by name.

        To be called whenever the model was replaced or got other parameters: they are listed here, not in every step.
        """
        self.is_channels_last = self._allows_channels_last and memory_format.use_channels_last(self.model)
        self._parameters = dict(self.model.named_parameters())
        everything = self._parameters.values()
        self._strided = [p for p in everything if not p.is_contiguous()]
        self._complex = [p for p in everything if p.is_complex()]
        self._are_alike = are_alike(everything)
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        if not trainable:
            raise UsageError("the model has no parameter to train; set requires_grad on at least one")
        self._refuse_lost_lr()
        self.device = next(iter(self._parameters.values())).device
        self.optimizer = self.recipe.optimizer(list(trainable.values()))
        self.initial_lrs = learning_rates(self.optimizer)
        own = {id(p) for p in self._parameters.values()}
        if any(id(p) not in own for group in self.optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer factory made an optimizer with parameters that are not the model's, and ranks would not "
                "average those; use its argument: lambda parameters: torch.optim.SGD(parameters, 0.1). If the loss "
                "has parameters, make them part of the model"
            )
        if self.optimizer_replaced_by:
            refuse_scheduler(self.optimizer, self.optimizer_replaced_by)
        for name, state in (states or {}).items():
            if state and name in trainable:
                self.optimizer.state[trainable[name]] = state
        self._adapt_state()

    def _refuse_lost_lr(self) -> None:
        """Raise UsageError if the learning rate was changed in an optimizer that is now to be replaced."""
        if self.optimizer_replaced_by and self.initial_lrs:
            refuse_changed_lr(learning_rates(self.optimizer), self.initial_lrs, self.optimizer_replaced_by)

    def release_model(self) -> None:
        """Free the memory of model and optimizer state. Set another model and call `new_optimizer` to train again."""
        self._refuse_lost_lr()
        self.initial_lrs = []
        self.model, self._parameters, self._strided, self._complex = nn.Module(), {}, [], []
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()

    def backward(self, batch: Batch, exchange: GradientExchange, exchanging: bool = True) -> Tensor:
        """Compute the gradients of the mean loss over the batch, and exchange them or not; returns the loss."""
        self.begin_step()
        if self.recipe.rehearses:
            self.loss = rehearse_backward(self.model, exchange, exchanging)
            return self.loss
        on_device = to_device(batch, self.device)
        if self.is_channels_last:
            on_device = self.recipe.batch_loss.map_inputs(on_device, channels_last)
        micro_batches = self.micro_batches(on_device)
        losses, in_forward = [], False
        may_fail = self.is_channels_last and not self._has_run
        before = memory_format.ForwardState(self.model, self.device) if may_fail else None
        try:
            for i, micro_batch in enumerate(micro_batches, 1):
                with nullcontext() if exchanging and i == len(micro_batches) else exchange.accumulating():
                    in_forward = True
                    with self._autocast:
                        share = num_samples_of(micro_batch) / num_samples_of(on_device) if len(micro_batches) > 1 else 1
                        loss = self._weighted_loss(micro_batch, exchange, share)
                    in_forward = False
                    loss.backward()
                losses.append(loss.detach())
        except RuntimeError as error:
            self._refuse_sparse()
            if in_forward and self.is_channels_last and memory_format.is_view_error(error):
                if before is not None:
                    before.restore()
                self.give_up_channels_last()
                return self.backward(batch, exchange, exchanging)
            unfinished = "Expected to have finished reduction" in str(error)  # how DDP reports it, one step late
            raise exchange.error or (missing_gradient_error() if unfinished else error) from None
        self._has_run = True
        if exchanging:
            exchange.finish()
        self.loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return self.loss

    def _weighted_loss(self, micro_batch: Batch, exchange: GradientExchange, share: float) -> Tensor:
        """The loss of a micro-batch times its share of the batch; its parts are added to those of the batch."""
        model = CountedCalls(self.model, exchange.forward)
        value = self.recipe.batch_loss(model, micro_batch)
        model.check()
        total = self._add_parts(value, share)
        return total if share == 1 else total * share

    def loss_of_output(self, output: Any, targets: Tensor, share: float) -> Tensor:
        """The loss of an output; its parts are added to those of the batch, times the micro-batch's share of it."""
        return self._add_parts(self.recipe.batch_loss.of_output(output, targets), share)

    def _add_parts(self, value: LossValue, share: float) -> Tensor:
        for name, part in value.parts.items():
            self.loss_parts[name] = self.loss_parts.get(name, 0) + share * part
        return value.total

    def give_up_channels_last(self) -> None:
        """Go on with a model that calls `view` on what a convolution returns; it fails in its first forward pass."""
        say(
            "the model calls view on what a convolution returns, which has channels_last order on a GPU; it goes on in "
            "the usual order, which is slower. Faster: flatten or reshape instead of view",
            once=True,
        )
        memory_format.keep_outputs_contiguous(self.model)
        self._allows_channels_last = self.is_channels_last = False

    def begin_step(self) -> None:
        """Forget gradients and parts of the loss of the step before."""
        self.zero_grad()
        self.loss_parts = {}

    def zero_grad(self) -> None:
        """Drop all gradients, also those that a backward pass outside of thinwire left (as in a GAN)."""
        for p in self._parameters.values():
            p.grad = None

    def update(self, lr_warmup: float = 1.0, total_norm: Callable[[Tensor], Tensor] = lambda norm: norm) -> None:
        """Check and clip the gradients, and take an optimizer step.

        `lr_warmup` goes from 0 to 1, which is the learning rate of the schedule. `total_norm` computes the norm of the
        whole model's gradient from the norm of the part on this rank.
        """
        if self.recipe.rehearses:
            total_norm(self.loss)  # which may be sent
            rehearse_update(self.optimizer)
            self.num_steps += 1
            return
        parameters = self._with_gradients()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(gradient_norm(gradients, self._are_alike))
        if self.recipe.clip_norm is not None:
            clip_gradients(parameters, gradients, self.recipe.clip_norm, norm, self._are_alike)
        self._finite_check.add(self.loss, norm, self.num_steps + 1)
        with scaled_lr(self.optimizer, self.recipe.schedule(self.num_steps), lr_warmup):
            self.optimizer.step()
        self.zero_grad()
        self.num_steps += 1

    def _with_gradients(self) -> list[Tensor]:
        """Parameters that have gradients; those are brought into forms that torch can clip and fused kernels take."""
        for p in self._strided:
            p.grad = in_order_of(p, p.grad)  # reducers return them in the usual order
        for p in self._complex:
            p.grad = None if p.grad is None else p.grad.resolve_conj()  # only marked as conjugated
        found = [p for p in self._parameters.values() if p.grad is not None]
        if {p.grad.layout for p in found if p.grad is not None} - {torch.strided}:
            self._refuse_sparse()
        return list(found)

    def _refuse_sparse(self) -> None:
        """Raise an error with the parameter's name; those of DDP and of torch's norm do not name the cause."""
        for name, p in self._parameters.items():
            refuse_sparse(p.grad, name)

    def check_finite(self) -> None:
        """Raise RunError if the loss or the gradient of a step so far was not finite. Waits for a GPU."""
        self._finite_check.check(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        self.check_finite()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        saved = copy.deepcopy(state["optimizer"])  # torch would train into the caller's tensors
        for there, here in zip(saved["param_groups"], self.optimizer.param_groups, strict=False):
            there |= {key: here[key] for key in IMPLEMENTATION if key in here}  # a run may go on on another device
        self.optimizer.load_state_dict(saved)
        self._finite_check = FiniteCheck()
        self._adapt_state()
        self.num_steps = state["num_steps"]

    def _adapt_state(self) -> None:
        """Bring moments into the order of their parameters, and counters of a fused optimizer to their device.

        Files have moments in the usual order, and some strategies keep counters on the CPU.
        """
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                state = self.optimizer.state.get(p, {})
                for name, value in state.items():
                    is_counter = isinstance(value, Tensor) and value.dim() == 0 and group.get("fused")
                    state[name] = value.to(p.device) if is_counter else in_order_of(p, value)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Split a batch into `accumulate` micro-batches of at least two samples: BatchNorm needs two."""
        if self.recipe.accumulate == 1:
            return [batch]
        number = min(self.recipe.accumulate, num_samples_of(batch) // 2)
        return split_batch(batch, number) if number > 1 else [batch]
