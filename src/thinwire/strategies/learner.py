"""What every strategy does between two exchanges: forward, backward, update."""

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

CHECK_EVERY_STEPS = 20  # how often a GPU's losses and gradients are looked at; each look waits for it
SLOW_LR = 1e-5  # where a learning rate climbs from when a strategy begins something new
Loss = Callable[[Any, Tensor], Tensor]  # (model output, targets) → mean over the batch


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, whatever the strategy."""

    loss: Loss
    optimizer: OptimizerFactory  # a factory: some strategies make parameters in mid-run
    schedule: Callable[[int], float] = lambda step: 1.0  # step → factor of the learning rate
    clip_norm: float | None = None
    accumulate: int = 1  # pieces that a batch is computed in; more = less memory, same update
    autocast: bool = False
    epochs: int | None = None  # in all; for strategies that begin or end otherwise than they go on


class Learner:
    """A model with its optimizer: forward, backward, update.

    `renewed_by` names the strategy that makes new optimizers in mid-run. It then cannot keep what others set in one.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, renewed_by: str = "") -> None:
        self.model = model
        self.recipe = recipe
        self.renewed_by = renewed_by
        self.num_steps = 0
        self.made_lrs: list[float] = []  # that the optimizer's groups were made with
        self.renew()
        self.loss = torch.zeros(())  # of the last step
        self._recent: list[Tensor] = []  # loss and norm of the gradient of steps not yet looked at

    def renew(self, states: Mapping[str, dict[str, Any]] | None = None) -> None:
        """A new optimizer for the parameters that there are now, with what it shall remember of some of them."""
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trainable:
            raise UsageError("the model has no parameter to train; set requires_grad on at least one")
        self._refuse_lost_lr()
        self.optimizer = self.recipe.optimizer(list(trainable.values()))
        self.made_lrs = [group["lr"] for group in self.optimizer.param_groups]
        own = {id(p) for p in self.model.parameters()}
        if any(id(p) not in own for group in self.optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer factory made an optimizer of other parameters than the model's, which ranks would not "
                "average; use its argument: lambda parameters: torch.optim.SGD(parameters, 0.1). Parameters of a loss "
                "belong into the model"
            )
        if self.renewed_by and has_scheduler(self.optimizer):
            raise UsageError(
                f"{self.renewed_by}: the optimizer factory makes a learning-rate scheduler, but this strategy makes a "
                "new optimizer in mid-run, where the scheduler would begin anew; give prepare a schedule instead, as "
                "schedule=lambda step: 0.99**step"
            )
        for name, state in (states or {}).items():
            if state and name in trainable:
                self.optimizer.state[trainable[name]] = state

    def _refuse_lost_lr(self) -> None:
        """Stop where a learning rate that somebody set would be lost with the optimizer that has it."""
        now = [group["lr"] for group in self.optimizer.param_groups] if self.made_lrs else []
        if self.renewed_by and now != self.made_lrs:
            raise UsageError(
                f"{self.renewed_by}: the optimizer's learning rate is {now[0]} now, but it was made with "
                f"{self.made_lrs[0]}; {self.renewed_by} makes a new optimizer, which would forget that. Give prepare a "
                "schedule instead, as schedule=lambda step: 0.99**step"
            )

    def let_go(self) -> None:
        """Hold no model and remember nothing of one, until another is set and `renew` is called."""
        self._refuse_lost_lr()
        self.made_lrs = []
        self.model = nn.Module()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()

    def backward(self, batch: Batch, exchange: GradientExchange, exchanging: bool = True) -> Tensor:
        """Gradients of the mean loss over the batch, in `accumulate` pieces, exchanged or not; returns that loss."""
        self.drop_gradients()
        device = next(self.model.parameters()).device
        inputs, targets = to_device(batch, device)
        pieces = list(zip(self.pieces(inputs), self.pieces(targets), strict=True))
        losses = []
        try:
            for i, (x, y) in enumerate(pieces, 1):
                with nullcontext() if exchanging and i == len(pieces) else exchange.accumulating():
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

    def drop_gradients(self) -> None:
        """Begin a step with no gradient, also where another backward pass left some: a GAN's, say."""
        self.model.zero_grad()

    def update(self, ease: float = 1.0, over_all: Callable[[Tensor], Tensor] = lambda norm: norm) -> None:
        """Check, clip, scale the learning rate, step. `ease` 1 is the schedule's learning rate, 0 almost none.

        `over_all` makes the norm of the whole model's gradient from that of the part that is here.
        """
        self._refuse_sparse()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for p in parameters:
            if p.grad is not None and p.grad.is_conj():  # only marked as conjugated, which torch cannot clip
                p.grad = p.grad.resolve_conj()
        gradients = [p.grad for p in parameters if p.grad is not None]
        wide = [g.float() if g.dtype == torch.float16 else g for g in gradients]  # whose norm may be beyond float16
        norm = over_all(nn.utils.get_total_norm(wide))
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_norm, norm)
        self._check(norm)
        with self._scaled_lr(self.recipe.schedule(self.num_steps), ease):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    @contextmanager
    def _scaled_lr(self, factor: float, ease: float) -> Iterator[None]:
        """Inside, learning rates are scaled; afterwards they are again what torch's scheduler or the user set."""
        found = [(group, group["lr"]) for group in self.optimizer.param_groups]
        for group, lr in found:
            group["lr"] = ease * lr * factor + (1 - ease) * min(lr * factor, SLOW_LR)
        try:
            yield
        finally:
            for group, lr in found:
                group["lr"] = lr

    def _refuse_sparse(self) -> None:
        """Of sparse gradients DDP says that it has no access, and a norm that there is none."""
        for name, p in self.model.named_parameters():
            refuse_sparse(p.grad, name)

    def _check(self, norm: Tensor) -> None:
        """Stop on a gradient that is not finite: at once, but a GPU is looked at only now and then."""
        self._recent.append(torch.stack([self.loss.float(), norm.float()]))
        if norm.is_cuda and len(self._recent) < CHECK_EVERY_STEPS:
            return
        recent = torch.stack(self._recent).cpu()
        self._recent.clear()
        if not recent.isfinite().all():
            first = int((~recent.isfinite().all(1)).nonzero()[0])
            loss = recent[first, 0]
            raise not_finite(self.num_steps + 2 - len(recent) + first, None if loss.isfinite() else loss.item())

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

    def pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """A batch in as many parts as it is computed in."""
        return tensor.tensor_split(max(1, min(self.recipe.accumulate, len(tensor) // 2)))  # BatchNorm needs two


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one of torch's schedulers was made for an optimizer: it notes the learning rate that it begins with."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def not_finite(step: int, loss: float | None) -> RunError:
    """The error for a step whose loss, or whose gradient, is not a number."""
    what = "the gradient is not finite" if loss is None else f"the loss is {loss}"
    return RunError(
        f"{what} at step {step}; try a lower --lr, a warm-up (--schedule 'cosine(warmup_epochs=1)') or --clip-norm 1"
    )
